"""GGUF tensors to a back end's decoder weights, one fused matrix after the other.

The canonical form of a matrix lives only until the back end has repacked it, so the peak is the
repacked model and the largest matrix's codes. q, k, v share one weight, and so do gate and up; a
tied output is the embedding's own weight, repacked once.
"""

from __future__ import annotations

from io import BufferedReader

import numpy as np

from slipstream.errors import LoadError
from slipstream.kernels.ops import Backend, Weight
from slipstream.models.arch import Arch
from slipstream.models.decoder import DecoderWeights, LayerWeights
from slipstream.models.loading.arch_map import EMBEDDING, NORM, OUTPUT
from slipstream.models.loading.gguf import GgufFile
from slipstream.models.weights import (
    DenseTensor,
    GroupNumbers,
    Tensor,
    TwoLevel,
    float16_numbers,
    widen,
)

_F16_EXPONENT, _BF16_EXPONENT = 0x7C00, 0x7F80  # all ones: an infinity or a NaN


def load_decoder(file: GgufFile, arch: Arch, backend: Backend) -> DecoderWeights:
    """Read every tensor of a validated file and repack it.

    Raises:
        LoadError: the file changed or cannot be read, or a tensor holds an infinity or NaN.
    """
    with file.open() as source:
        reader = _Reader(file, source, backend)
        embedding = reader.matrix(EMBEDDING)
        layers = tuple(_load_layer(reader, index) for index in range(arch.num_layers))
        norm = reader.vector(NORM)
        output = embedding if arch.tied_embedding else reader.matrix(OUTPUT)
    return DecoderWeights(embedding=embedding, layers=layers, norm=norm, output=output)


class _Reader:
    """Reads tensors by name and hands them to the back end."""

    def __init__(self, file: GgufFile, source: BufferedReader, backend: Backend) -> None:
        self._file = file
        self._source = source
        self._backend = backend

    def matrix(self, *names: str) -> Weight:
        return self._backend.matrix([self._read(name) for name in names])

    def vector(self, name: str) -> Weight:
        return self._backend.vector(self._read(name))

    def _read(self, name: str) -> Tensor:
        tensor = self._file.read_tensor(self._source, name)
        if not is_finite(tensor):
            raise LoadError(f"tensor {name} holds an infinity or NaN", hint="fetch the file again")
        return tensor


def _load_layer(reader: _Reader, index: int) -> LayerWeights:
    prefix = f"blk.{index}."
    return LayerWeights(
        attn_norm=reader.vector(f"{prefix}attn_norm.weight"),
        qkv=reader.matrix(*(f"{prefix}attn_{part}.weight" for part in "qkv")),
        attn_out=reader.matrix(f"{prefix}attn_output.weight"),
        ffn_norm=reader.vector(f"{prefix}ffn_norm.weight"),
        gate_up=reader.matrix(f"{prefix}ffn_gate.weight", f"{prefix}ffn_up.weight"),
        down=reader.matrix(f"{prefix}ffn_down.weight"),
    )


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value, or every scale and bias, is a finite number."""
    if isinstance(tensor, DenseTensor):
        if tensor.dtype == "f32":
            return bool(np.isfinite(tensor.values).all())
        exponent = _BF16_EXPONENT if tensor.dtype == "bf16" else _F16_EXPONENT
        return not _reaches(tensor.values, exponent)
    parts = (tensor.scale,) if tensor.bias is None else (tensor.scale, tensor.bias)
    return all(_is_bounded(part, 1 << tensor.bits) for part in parts)


def _is_bounded(numbers: GroupNumbers, factor: int) -> bool:
    """Return whether the numbers of the groups, times any code below `factor`, are finite."""
    if isinstance(numbers, TwoLevel):
        return not _reaches(numbers.super, _F16_EXPONENT)
    halves = float16_numbers(numbers)
    if halves is not None:
        return not _reaches(halves, _F16_EXPONENT)
    # A damaged exponent of bfloat16 or float32 may be finite and yet overflow in the product.
    limit = np.finfo(np.float32).max / (2 * factor)
    return bool((np.abs(widen(numbers)) < limit).all())


def _reaches(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], exponent: int) -> bool:
    """Return whether any 16-bit float has all exponent bits set (numpy computes f16 slowly)."""
    mask = np.uint16(exponent)
    return bool(((values.view(np.uint16) & mask) == mask).any())
