"""Typed reads of GGUF metadata: the value, the default, or a message that names the key.

A header's types are the writer's choice (counts come as u32, u64 or i32), so a read states what it
needs and in which range; anything else is a LoadError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from slipstream.errors import LoadError
from slipstream.models.loading.cursor import Value

T = TypeVar("T")
Metadata = Mapping[str, Value]
# What no constant of a model reaches, and float32 holds with room for its square to spare.
SMALLEST, LARGEST = 1e-18, 1e18


def read_int(metadata: Metadata, key: str, low: int, high: int, default: int | None = None) -> int:
    """Return an integer in [low, high]; a missing key gives `default`, if there is one.

    An array whose entries are all equal counts as that one integer: files with a value per layer
    write it so.

    Raises:
        LoadError: missing, of another type, varying, or out of range.
    """
    value = metadata.get(key)
    if value is None:
        return _default(key, default)
    if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
        if not (value == value[0]).all():
            raise LoadError(
                f"{key} must be the same for every layer, got {value.min()} to {value.max()}"
            )
        value = int(value[0])
    if isinstance(value, bool) or not isinstance(value, int):
        raise LoadError(f"{key} must be an integer, got {describe(value)}")
    if not low <= value <= high:
        raise LoadError(f"{key} must be in [{low}, {high}], got {describe(value)}")
    return value


def read_float(
    metadata: Metadata,
    key: str,
    default: float | None = None,
    low: float = SMALLEST,
    high: float = LARGEST,
) -> float:
    """Return a number in [low, high]; a missing key gives `default`, if there is one.

    Raises:
        LoadError: missing, of another type or out of range.
    """
    value = metadata.get(key)
    if value is None:
        return _default(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LoadError(f"{key} must be a number, got {describe(value)}")
    if not low <= value <= high:  # an integer of any size compares, NaN never does
        raise LoadError(f"{key} must be in [{low:g}, {high:g}], got {describe(value)}")
    return float(value)


def read_str(metadata: Metadata, key: str, default: str | None = None) -> str:
    """Return a text; a missing key gives `default`, if there is one.

    Raises:
        LoadError: missing or of another type.
    """
    value = metadata.get(key)
    if value is None:
        return _default(key, default)
    if not isinstance(value, str):
        raise LoadError(f"{key} must be a text, got {describe(value)}")
    return value


def read_bool(metadata: Metadata, key: str, default: bool) -> bool:
    """Return a bool; a missing key gives `default`.

    Raises:
        LoadError: of another type.
    """
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise LoadError(f"{key} must be a bool, got {describe(value)}")
    return value


def read_texts(metadata: Metadata, key: str) -> list[str]:
    """Return an array of texts.

    Raises:
        LoadError: missing or of another type.
    """
    value = metadata.get(key)
    if not isinstance(value, list):
        raise LoadError(f"{key} must be an array of texts, got {describe(value)}")
    return value


def describe(value: Value | None) -> str:
    """Return a short text for a value of any type, for messages."""
    if value is None:
        return "nothing (the key is missing)"
    if isinstance(value, list):
        kind = "texts" if all(isinstance(item, str) for item in value) else "entries"
        return f"an array of {len(value)} {kind}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} numbers"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _default(key: str, default: T | None) -> T:
    if default is None:
        raise LoadError(f"metadata key {key} is missing")
    return default
