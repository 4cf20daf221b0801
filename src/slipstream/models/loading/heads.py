"""Which reader an assistant's folder is for: Slipstream's own checkpoints, or Gemma 4's."""

from __future__ import annotations

import json
import os
from pathlib import Path

from slipstream.models.arch import Arch
from slipstream.models.head import HeadCheckpoint
from slipstream.models.loading.assistant import read_assistant
from slipstream.models.loading.assistant_config import CONFIG_FILE
from slipstream.models.loading.gemma_assistant import MODEL_TYPES, read_gemma_assistant


def read_head(path: str | os.PathLike[str], arch: Arch, fingerprint: str) -> HeadCheckpoint:
    """Read an assistant's checkpoint for a target.

    Args:
        path: the folder.
        arch: the target's decoder.
        fingerprint: the target's `ModelFile.fingerprint`.

    Raises:
        LoadError: the folder is missing or damaged, or a key or tensor is not as it must be.
        MismatchError: it was made for another target; both values are named.
    """
    path = Path(path)
    if _model_type(path) in MODEL_TYPES:
        return read_gemma_assistant(path, arch)
    return read_assistant(path, arch, fingerprint)


def is_assistant(path: str | os.PathLike[str]) -> bool:
    """Tell whether a folder is to be read as an assistant's, rather than as a whole model.

    A folder without a configuration that can be read is neither; an assistant's reader says best
    what it lacks.
    """
    kind = _model_type(Path(path))
    return Path(path).is_dir() and (not isinstance(kind, str) or "assistant" in kind)


def _model_type(path: Path) -> object:
    """Return what a folder's configuration calls itself, None where there is nothing to read."""
    try:
        block = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return block.get("model_type") if isinstance(block, dict) else None
