"""Models of a hub: `org/name`, `org/name@revision`, `org/name:file.gguf`.

`pull` is the one command that uses the network; everything else takes what the hub's cache on this
machine has. The cache is that of `huggingface_hub` (`HF_HOME`), so what other tools have fetched is
found, and `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they mean elsewhere. A download
that broke off is resumed.

Only what holds plain data is fetched: safetensors, GGUF, JSON and a tokenizer's own files. Pickled
weights and Python files run code when they are loaded, so neither is ever asked for.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.errors import LoadError

Progress = Callable[[str, float], None]  # what is going on, and the part of it done in [0, 1]

MAIN = "main"
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
# Small files beside the weights, all of them plain text or tables.
TABLES = ("tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja")
_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>\w[\w./-]*))?(?::(?P<file>\w[\w./-]*))?"
)
_REPOSITORY = "models--"  # what the cache calls a folder, in front of the id
_HASH_BYTES = 1 << 20
_SHOWN = 12  # file names in a message


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of a hub.

    Attributes:
        repo: organisation and name.
        revision: branch, tag or commit.
        file: the one GGUF file that is meant, "" where the repository leaves no choice.
    """

    repo: str
    revision: str = MAIN
    file: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo}{revision}{':' if self.file else ''}{self.file}"

    @property
    def cache_path(self) -> Path:
        """The repository's folder in the hub's cache, which need not exist."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"{_REPOSITORY}{self.repo.replace('/', '--')}"


def parse_hub_id(text: str) -> HubModel | None:
    """Return the model of a hub that a text names, None where it cannot be one.

    Raises:
        LoadError: it names a file in a repository that no model is read from.
    """
    found = _ID.fullmatch(text.strip())
    if found is None or found["repo"].lower().endswith(".gguf"):
        return None
    file = found["file"] or ""
    if ".." in (found["revision"] or "").split("/"):
        return None
    if file and (not file.lower().endswith(".gguf") or ".." in file.split("/")):
        raise LoadError(f"the file of a hub's model must be a .gguf, got {file!r} in {text!r}")
    return HubModel(repo=found["repo"], revision=found["revision"] or MAIN, file=file)


def title_of(folder: Path) -> str:
    """Return what a model's folder is called: in the hub's cache its own name is a commit's."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith(_REPOSITORY):
        return repository.removeprefix(_REPOSITORY).replace("--", "/", 1)
    return folder.name


def find_cached(model: HubModel) -> Path:
    """Return the folder or GGUF file of a model that was pulled; no network is used.

    Raises:
        LoadError: it was not pulled, or not in full, or it is not said which file is meant.
    """
    hint = f"slipstream pull {model}"
    root = model.cache_path
    reference = root / "refs" / model.revision
    commit = reference.read_text("utf-8").strip() if reference.is_file() else model.revision
    folder = root / "snapshots" / commit
    if not folder.is_dir():
        raise LoadError(
            f"{model} is neither a file nor a model in the hub's cache, {root.parent}", hint=hint
        )
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    chosen = _choose(model, names, lambda name: (folder / name).read_bytes())
    missing = [name for name in chosen if name not in names]
    if missing:
        raise LoadError(f"{model} was not pulled in full: {_listed(missing)} missing", hint=hint)
    return folder / chosen[0] if chosen[0].lower().endswith(".gguf") else folder


def fetch(model: HubModel, progress: Progress) -> Path:
    """Fetch what a model needs into the hub's cache and return its folder or GGUF file.

    Args:
        progress: called with a stage ("list", "download", "check") and the part done in [0, 1].

    Raises:
        LoadError: the hub cannot be reached, has no such model, asks for a token, or sends
            something else than it announced.
    """
    progress("list", 0.0)
    try:
        return _fetch(model, progress)
    except LoadError:
        raise
    except Exception as error:  # whatever the library's own transport raises
        raise _explained(model, error) from error


def _fetch(model: HubModel, progress: Progress) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    info = HfApi().model_info(model.repo, revision=model.revision, files_metadata=True)
    commit = str(info.sha)
    entries = {entry.rfilename: entry for entry in info.siblings or []}
    sizes = {name: int(entry.size or 0) for name, entry in entries.items()}

    def take(name: str) -> Path:
        return Path(hf_hub_download(model.repo, name, revision=commit))

    chosen = _choose(model, list(entries), lambda name: take(name).read_bytes())
    missing = [name for name in chosen if name not in entries]
    if missing:
        raise LoadError(f"{model.repo} lacks {_listed(missing)}, which its {INDEX} names")
    total, done = max(1, sum([sizes[name] for name in chosen])), 0
    progress("download", 0.0)
    paths = {}
    for name in chosen:
        if entries[name].lfs is not None:
            _download(model, name, commit, partial(_share, progress, done, total))
        paths[name] = take(name)
        done += sizes[name]
        _share(progress, done, total, 0)
    for name, path in paths.items():
        digest = getattr(entries[name].lfs, "sha256", None)
        if digest is not None:
            _check(model, name, path, digest, progress)
    if commit != model.revision:  # now that all of it is there
        reference = model.cache_path / "refs" / model.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit, "utf-8")
    return find_cached(model)


def _download(model: HubModel, name: str, commit: str, tell: Callable[[int], None]) -> None:
    """Fetch a large file to where the library looks for it, going on where a download broke off.

    The library itself resumes within one call only: what an interrupted one has fetched it throws
    away.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        WeakFileLock,
        build_hf_headers,
    )

    url = hf_hub_url(model.repo, name, revision=commit)
    metadata = get_hf_file_metadata(url)
    folder = model.cache_path / "blobs"
    locks = model.cache_path.parent / ".locks" / model.cache_path.name
    for each in (folder, locks):
        each.mkdir(parents=True, exist_ok=True)
    blob, part = folder / str(metadata.etag), folder / f"{metadata.etag}.slipstream"
    # Older releases show bars of their own, and the part done moves file by file.
    takes_bars = "tqdm_class" in inspect.signature(http_get).parameters
    bars: dict[str, Any] = {"tqdm_class": _bar(tell)} if takes_bars else {}
    with WeakFileLock(locks / f"{part.name}.lock"):
        if blob.exists():
            return
        with part.open("ab+") as file:
            begun = file.tell()
            if metadata.size is None or begun > metadata.size:
                file.truncate(0)
                begun = 0
            if begun != metadata.size:
                http_get(
                    url,
                    file,
                    resume_size=begun,
                    headers=build_hf_headers(),
                    expected_size=metadata.size,
                    **bars,
                )
        os.replace(part, blob)


def _choose(model: HubModel, names: Sequence[str], read: Callable[[str], bytes]) -> list[str]:
    """Return the files that a model needs, small ones first; some may be missing.

    Args:
        names: files that are there.
        read: returns the content of one of them.
    """
    ggufs = sorted(name for name in names if name.lower().endswith(".gguf"))
    if model.file:
        if model.file not in ggufs:
            raise LoadError(f"{model.repo} has no {model.file}, it has {_listed(ggufs)}")
        return [model.file]
    weights = _weights(names, read)
    if CONFIG in names and weights:
        flat = [name for name in names if "/" not in name]
        small = sorted(
            name
            for name in flat
            if name in TABLES or (name.endswith(".json") and not name.endswith(".index.json"))
        )
        index = [INDEX] if INDEX in names else []
        return [*small, *index, *weights]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise LoadError(
            f"{model.repo} has several files: {_listed(ggufs)}",
            hint=f"name one of them: {model.repo}:{ggufs[0]}",
        )
    raise LoadError(
        f"{model.repo} has no weights that are plain data: a GGUF file, or {CONFIG} and "
        f"safetensors; it has {_listed(sorted(names))}",
        hint="pickled weights (.bin, .pt, .pth) run code when they are loaded and are never read",
    )


def _weights(names: Sequence[str], read: Callable[[str], bytes]) -> list[str]:
    """Return the safetensors of a repository: those of its index, else the one, else all."""
    if INDEX in names:
        try:
            shards = json.loads(read(INDEX))["weight_map"].values()
            found = sorted({str(name) for name in shards})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(f"{INDEX} is damaged: {error}") from error
        # What an index names is a path of somebody else's making.
        if any("/" in name or not name.endswith(".safetensors") for name in found):
            raise LoadError(f"{INDEX} must name safetensors beside it, got {_listed(found)}")
        return found
    if SINGLE in names:
        return [SINGLE]
    return sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)


def _share(progress: Progress, done: int, total: int, more: int) -> None:
    progress("download", min(1.0, (done + more) / total))


def _check(model: HubModel, name: str, path: Path, digest: str, progress: Progress) -> None:
    """Compare a file with what the hub announced; one that differs does not stay."""
    num_bytes, read = max(1, path.stat().st_size), 0
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_BYTES):
            found.update(chunk)
            read += len(chunk)
            progress("check", read / num_bytes)
    if found.hexdigest() != digest:
        for stale in {path.resolve(), path}:
            stale.unlink(missing_ok=True)
        raise LoadError(
            f"{name} of {model.repo} must have SHA-256 {digest}, got {found.hexdigest()}",
            hint="the hub sent something else than it announced; nothing of the file was kept",
        )


def _bar(tell: Callable[[int], None]) -> type[Any]:
    """Return what the library takes for a progress bar: it tells how many bytes are there."""

    class Bar:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            self.n = initial
            tell(self.n)

        def update(self, count: float | None = 1) -> None:
            self.n += int(count or 0)
            tell(self.n)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            """Leave nothing behind."""

        def close(self) -> None:
            """Leave nothing behind."""

        def set_description(self, *_: Any, **__: Any) -> None:
            """Show nothing."""

        def refresh(self, *_: Any, **__: Any) -> None:
            """Show nothing."""

    return Bar


def _explained(model: HubModel, error: Exception) -> LoadError:
    """Return what went wrong in words, and what to do about it."""
    from huggingface_hub import constants, errors

    repo, where = model.repo, constants.ENDPOINT
    said = _first_line(error)
    if isinstance(error, errors.GatedRepoError):
        return LoadError(
            f"{repo} is gated: {where} wants a token of somebody who accepted its terms",
            hint=f"accept them at {where}/{repo}, and set HF_TOKEN to a token of yours",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return LoadError(f"{repo} has no revision {model.revision!r} on {where}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return LoadError(
            f"there is no model {repo} on {where}, or it is private",
            hint="check the spelling; for a private one set HF_TOKEN",
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return LoadError(
            f"{repo} cannot be fetched: HF_HUB_OFFLINE forbids it",
            hint=f"unset it, or pull where there is a network and copy {model.cache_path}",
        )
    if isinstance(error, errors.EntryNotFoundError) and _status_of(error) == 404:
        return LoadError(f"{repo} lacks a file that it lists: {said}")
    if isinstance(error, errors.HfHubHTTPError) and _status_of(error):
        return LoadError(f"{where} refuses {repo}: {said}", hint="try again later")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return LoadError(
            f"{repo} cannot be written to {model.cache_path}: {error.strerror}",
            hint="set HF_HOME to another folder",
        )
    return LoadError(
        f"{repo} cannot be fetched from {where}: {said}",
        hint="check the network, HF_ENDPOINT and the proxy, then pull again: what is there already "
        f"is kept. Without a network, copy {model.cache_path} from a machine that has one",
    )


def _status_of(error: Exception) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _first_line(error: BaseException) -> str:
    """Return the first words of what an error says, or of what caused it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__ or error.__context__
    if cause is not None and type(error).__name__ == "LocalEntryNotFoundError":
        return _first_line(cause)
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "nothing"
