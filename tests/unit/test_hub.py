"""Hub ids: fetched by `pull` alone, from a hub on loopback, and found without a network then."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from slipstream.cli import main
from slipstream.engine.load import load
from slipstream.errors import ConfigError, LoadError
from slipstream.models.loading import pull, resolve_model
from slipstream.models.loading.hub import HubModel, parse_hub_id
from slipstream.types import SamplingParams
from tests.fake_hub import COMMIT, FakeHub, serve_hub
from tests.unit.test_draft_model_load import toy_model

WEIGHTS = bytes(range(256)) * 200
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
FOLDER = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "merges.txt": b"a b",
    "model.safetensors": WEIGHTS,
    "README.md": b"# hello",
    "modeling.py": b"raise SystemExit",
    "pytorch_model.bin": b"\x80\x04",
    "onnx/model.onnx": b"onnx",
    "sub/more.safetensors": b"more",
    "consolidated.safetensors": b"the same again",
}
REPOS = {
    "org/folder": FOLDER,
    "org/one": {"one.Q4_0.gguf": WEIGHTS, "README.md": b"#"},
    "org/two": {"a.gguf": WEIGHTS, "b.gguf": WEIGHTS[::-1]},
    "org/sharded": {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"x": SHARDS[0], "y": SHARDS[1], "z": SHARDS[0]}}
        ).encode(),
        SHARDS[0]: WEIGHTS,
        SHARDS[1]: WEIGHTS[:100],
        "extra.safetensors": b"not in the index",
    },
    "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"\x80\x04"},
    "org/gated": {"model.gguf": WEIGHTS},
    "org/lying": {
        "config.json": b"{}",
        "model.safetensors.index.json": b'{"weight_map": {"x": "../../x.safetensors"}}',
    },
    "org/lacking": {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps({"weight_map": {"x": SHARDS[0]}}).encode(),
    },
}


def set_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Do what HF_ENDPOINT does to a process that begins."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """Serve a hub, with a cache that nothing is in."""
    with serve_hub({name: dict(files) for name, files in REPOS.items()}) as served:
        served.gated.add("org/gated")
        set_endpoint(monkeypatch, served.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield served


def test_an_id_is_a_repository_a_revision_and_a_file() -> None:
    assert parse_hub_id("org/name") == HubModel(repo="org/name")
    assert parse_hub_id("org/name@v1.0") == HubModel(repo="org/name", revision="v1.0")
    named = HubModel(repo="org/name", revision="refs/pr/1", file="sub/a.Q4_0.gguf")
    assert parse_hub_id("org/name@refs/pr/1:sub/a.Q4_0.gguf") == named
    assert str(named) == "org/name@refs/pr/1:sub/a.Q4_0.gguf"
    assert str(HubModel(repo="org/name", file="a.gguf")) == "org/name:a.gguf"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "smollm2-135m",
            "./model",
            "/abs/model",
            "a/b/c",
            "org/",
            "/name",
            "models/x.gguf",
            "~/x",
        ),
        *("../x", "org/name@", "org/name:", "org/name@../../x", "org name/x", ".a/b"),
    ],
)
def test_what_is_no_id_is_a_path_or_a_name(text: str) -> None:
    assert parse_hub_id(text) is None


@pytest.mark.parametrize("file", ["model.bin", "a.safetensors", "sub/../../a.gguf"])
def test_a_file_must_be_a_gguf_within_the_repository(file: str) -> None:
    with pytest.raises(LoadError, match=r"must be a \.gguf"):
        parse_hub_id(f"org/name:{file}")


def test_a_folder_comes_without_anything_that_runs_code(hub: FakeHub) -> None:
    path = pull("org/folder")
    names = {"config.json", "tokenizer.json", "merges.txt", "model.safetensors"}
    assert {file.name for file in path.iterdir()} == names
    assert set(hub.names_sent()) == names
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_shards_are_those_of_the_index(hub: FakeHub) -> None:
    path = pull("org/sharded")
    assert {file.name for file in path.iterdir()} == {
        *("config.json", "model.safetensors.index.json"),
        *SHARDS,
    }


def test_a_single_gguf_needs_no_name_and_one_of_several_does(hub: FakeHub) -> None:
    assert pull("org/one").read_bytes() == WEIGHTS
    with pytest.raises(LoadError, match=r"several files: a\.gguf, b\.gguf") as caught:
        pull("org/two")
    assert caught.value.hint == "name one of them: org/two:a.gguf"
    assert pull("org/two:b.gguf").read_bytes() == WEIGHTS[::-1]
    assert hub.names_sent().count("a.gguf") == 0
    # What is there alone leaves no doubt any more.
    assert resolve_model("org/two").name == "b.gguf"


def test_what_was_pulled_needs_no_network(hub: FakeHub) -> None:
    folder, file = pull("org/folder"), pull("org/one")
    pinned = pull(f"org/one@{COMMIT}")
    asked = len(hub.requests)
    hub.status = 503
    assert resolve_model("org/folder") == folder
    assert resolve_model("org/one") == resolve_model("org/one:one.Q4_0.gguf") == file == pinned
    assert len(hub.requests) == asked


def test_what_was_not_pulled_is_not_asked_for(hub: FakeHub) -> None:
    with pytest.raises(LoadError, match="neither a file nor a model in the hub's cache") as caught:
        resolve_model("org/folder")
    assert caught.value.hint == "slipstream pull org/folder"
    assert hub.requests == []


def test_a_folder_of_that_name_goes_first(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "one").write_bytes(b"mine")
    pull("org/one")
    assert resolve_model("org/one") == Path("org/one")


def test_pulling_again_sends_nothing_again(hub: FakeHub) -> None:
    first = pull("org/folder")
    sent = len(hub.names_sent())
    assert pull("org/folder") == first
    assert len(hub.names_sent()) == sent


def test_a_revision_is_kept_apart(hub: FakeHub) -> None:
    pull("org/one@v1")
    assert resolve_model("org/one@v1").read_bytes() == WEIGHTS
    with pytest.raises(LoadError, match="org/one is neither"):
        resolve_model("org/one")


def ranges(hub: FakeHub, name: str) -> list[str | None]:
    return [span for method, path, span in hub.requests if method == "GET" and path.endswith(name)]


def test_a_connection_that_breaks_is_resumed(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.cut_after = 30_000
    assert pull("org/one").read_bytes() == WEIGHTS
    first, second = ranges(hub, ".gguf")
    assert first is None
    assert second is not None
    assert second.startswith("bytes=")
    assert int(second[6:].rstrip("-")) >= 20_000


def test_an_interrupted_pull_goes_on_where_it_stopped(hub: FakeHub) -> None:
    def interrupt(stage: str, part: float) -> None:
        if stage == "download" and part > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("org/one", interrupt)
    with pytest.raises(LoadError):  # half of a model is none
        resolve_model("org/one")
    assert pull("org/one").read_bytes() == WEIGHTS
    assert (ranges(hub, ".gguf")[-1] or "").startswith("bytes=")


def test_progress_never_goes_back_and_ends_at_all_of_it(hub: FakeHub) -> None:
    parts: dict[str, list[float]] = {}
    pull("org/sharded", lambda stage, part: parts.setdefault(stage, []).append(part))
    assert list(parts) == ["list", "download", "check"]
    assert parts["download"] == sorted(parts["download"])
    assert parts["download"][-1] == 1.0
    assert len(parts["download"]) > 20


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("org/none", "there is no model org/none on", "HF_TOKEN"),
        ("org/gated", "org/gated is gated", "HF_TOKEN"),
        ("org/one@v9", "org/one has no revision 'v9'", None),
        ("org/one:other.gguf", r"org/one has no other\.gguf, it has one\.Q4_0\.gguf", None),
        ("org/pickled", "no weights that are plain data", "run code"),
        ("org/lying", "must name safetensors beside it", None),
        ("org/lacking", f"org/lacking lacks {SHARDS[0]}", None),
    ],
)
def test_what_cannot_be_had_is_said(
    hub: FakeHub, name: str, message: str, hint: str | None
) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        pull(name)
    assert hint is None or hint in (caught.value.hint or "")


def test_a_token_opens_what_is_gated(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "good")
    assert pull("org/gated").read_bytes() == WEIGHTS


def test_a_hub_that_fails_is_quoted(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.status = 500
    with pytest.raises(LoadError, match="500 Internal Server Error"):
        pull("org/one")


def test_a_hub_out_of_reach_is_said_with_what_to_do(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
        set_endpoint(monkeypatch, nobody)
        with pytest.raises(LoadError, match=f"cannot be fetched from {nobody}: ConnectError") as c:
            pull("org/one")
    assert "check the network" in (c.value.hint or "")
    assert "models--org--one" in (c.value.hint or "")


def test_offline_mode_is_honoured(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull("org/one")
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/one") == path
    with pytest.raises(LoadError, match="HF_HUB_OFFLINE forbids it"):
        pull("org/two")
    assert len(hub.requests) == asked


def test_content_that_differs_from_what_was_announced_does_not_stay(hub: FakeHub) -> None:
    hub.announced["one.Q4_0.gguf"] = WEIGHTS[::-1]  # of the same size
    with pytest.raises(LoadError, match="must have SHA-256"):
        pull("org/one")
    with pytest.raises(LoadError):
        resolve_model("org/one")
    hub.announced.clear()
    assert pull("org/one").read_bytes() == WEIGHTS


def test_a_model_and_its_draft_model_may_both_be_of_a_hub(hub: FakeHub, tmp_path: Path) -> None:
    large, small = toy_model(tmp_path, "large", 1), toy_model(tmp_path, "small", 2)
    hub.repos["org/large"] = {"large.gguf": large.read_bytes()}
    hub.repos["org/small"] = {"a.gguf": b"", "small.gguf": small.read_bytes()}
    pull("org/large")
    pull("org/small:small.gguf")
    hub.status = 503
    asked = SamplingParams(max_tokens=8, ignore_eos=True)
    plain = load(large, drafter="none", profile="off").generate(["hello"], asked)[0]
    engine = load("org/large", drafter="org/small:small.gguf", k=3, profile="off")
    (reply,) = engine.generate(["hello"], asked)
    assert reply.token_ids == plain.token_ids
    assert reply.speculation.drafter == "draft_model"
    assert reply.speculation.drafted > 0
    with pytest.raises(LoadError, match="org/other is neither a file nor a model"):
        load(large, drafter="ngram+org/other", profile="off")


def test_two_pulls_of_one_model_agree(hub: FakeHub) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull("org/one"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == WEIGHTS
    assert len(ranges(hub, ".gguf")) == 1


def test_a_snapshot_that_lacks_a_shard_is_named(hub: FakeHub) -> None:
    path = pull("org/sharded")
    (path / SHARDS[1]).unlink()
    with pytest.raises(LoadError, match=rf"not pulled in full: {SHARDS[1]} missing") as caught:
        resolve_model("org/sharded")
    assert caught.value.hint == "slipstream pull org/sharded"


def test_the_command_prints_the_path_last(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "org/one", "--revision", "v1"]) == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()) == resolve_model("org/one@v1")
    assert "org/one@v1: download" in err
    assert main(["pull", "org/none"]) == 1
    assert "hint: check the spelling" in capsys.readouterr().err
    for words in (["smollm2-135m", "--revision", "v1"], ["org/one@v1", "--revision", "v2"]):
        assert main(["pull", *words]) == 2
        assert "--revision goes with ORG/NAME" in capsys.readouterr().err


def test_a_revision_belongs_to_the_repository_not_to_the_file() -> None:
    from slipstream.cli.pull import with_revision

    assert with_revision("org/name:a.gguf", "v1") == "org/name@v1:a.gguf"
    with pytest.raises(ConfigError):
        with_revision("name", "v1")
