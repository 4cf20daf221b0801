"""The state of a training run on disk: weights and the optimiser's moments, as safetensors.

Written beside the old one and renamed over it, so that a run that is stopped at any moment finds a
whole one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import LoadError


def save_state(path: Path, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-like record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    stored = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
    save_file(stored, partial, metadata={"progress": json.dumps(progress)})
    os.replace(partial, path)


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read them back; None if there is no such file.

    Raises:
        LoadError: it is damaged.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            progress = json.loads((file.metadata() or {})["progress"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise LoadError(
            f"{path} cannot be read: {error}", hint="remove it to train from the first step"
        ) from error
    return tensors, progress
