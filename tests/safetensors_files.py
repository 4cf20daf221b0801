"""Safetensors files byte by byte: bfloat16 without torch, and fields that are wrong on purpose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Stored = Mapping[str, tuple[str, npt.NDArray[np.generic]]]


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def safetensors_bytes(tensors: Stored, **changes: Any) -> bytes:
    """Return a file; `changes` replace or, where None, remove entries of its header."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, values) in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    header |= changes
    text = json.dumps({key: item for key, item in header.items() if item is not None}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data
