"""MLX folders for tests: matrices quantized the way MLX's documentation defines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.models.weights import F32
from tests.safetensors_files import safetensors_bytes, to_bf16

FLOATS = {"BF16": to_bf16, "F16": lambda x: x.astype(np.float16), "F32": lambda x: x}


@dataclass(frozen=True, kw_only=True)
class Affine:
    """A quantized matrix: what is stored, and the values that it means."""

    packed: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.generic]
    biases: npt.NDArray[np.generic]
    values: F32


def quantize(values: F32, *, bits: int = 4, group: int = 64, dtype: str = "BF16") -> Affine:
    """Span each group's range with the codes of `bits` bits."""
    n, k = values.shape
    groups = values.reshape(n, -1, group)
    low = groups.min(axis=2)
    scales = FLOATS[dtype]((groups.max(axis=2) - low) / np.float32(2**bits - 1))
    biases = FLOATS[dtype](low)
    scale, bias = (widen(part, dtype)[:, :, None] for part in (scales, biases))
    divisor = np.where(scale == 0, 1, scale)
    codes = np.clip(np.rint((groups - bias) / divisor), 0, 2**bits - 1).astype(np.uint8)
    return Affine(
        packed=pack(codes.reshape(n, k), bits),
        scales=scales,
        biases=biases,
        values=(codes.astype(np.float32) * scale + bias).reshape(n, k),
    )


def widen(values: npt.NDArray[Any], dtype: str) -> F32:
    """Return stored numbers as float32."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint32]:
    """Put codes one behind the other into words, the lowest bits first."""
    n, k = codes.shape
    words = np.zeros((n, k * bits // 32), np.uint32)
    for column in range(k):
        for bit in range(bits):
            word, place = divmod(column * bits + bit, 32)
            words[:, word] |= (codes[:, column].astype(np.uint32) >> bit & 1) << place
    return words


def write_mlx(
    folder: Path,
    weights: Mapping[str, F32],
    quantization: Mapping[str, Any],
    *,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
) -> dict[str, F32]:
    """Write a folder; return the values that its tensors mean.

    Args:
        weights: by MLX's names; matrices are quantized unless their module's setting is false.
        quantization: the object of that name in config.json.
    """
    stored: dict[str, tuple[str, npt.NDArray[np.generic]]] = {}
    means: dict[str, F32] = {}
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        own = quantization.get(module, quantization)
        if values.ndim != 2 or own is False:
            stored[name] = (dtype, FLOATS[dtype](values))
            means[name] = widen(stored[name][1], dtype)
            continue
        made = quantize(values, bits=own["bits"], group=own["group_size"], dtype=dtype)
        stored[name] = ("U32", made.packed)
        stored[f"{module}.scales"] = (dtype, made.scales)
        stored[f"{module}.biases"] = (dtype, made.biases)
        means[name] = made.values
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    block = dict(config or {}) | {"quantization": quantization, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(block))
    return means
