"""MLX folders: safetensors whose matrices may be affinely quantized.

A quantized `x` is `x.weight`, codes of 4, 5, 6 or 8 bits packed into uint32 from the lowest bit on;
`x.scales` and `x.biases`, one number for each group of a row in the model's own type. Its value is
scale * code + bias: MLX's kernels work in float32, round the product, then the sum, as
`QuantizedTensor.dequantize` does. (MLX's `dequantize` alone, and so its embedding, rounds both to
the model's type.) `quantization` in config.json has bits and group size, and may have others for a
module by its name, or false for one that stays dense.

Source: `quantize` and `dequantize` in MLX's documentation; "mode" other than "affine" is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import LoadError
from slipstream.models.loading.checkpoint import TensorReader
from slipstream.models.loading.metadata import describe
from slipstream.models.loading.safetensors_files import (
    DenseSource,
    Maps,
    SafetensorsFiles,
)
from slipstream.models.weights import BFloat16, GroupNumbers, QuantizedTensor, Tensor

BITS, GROUPS = (4, 5, 6, 8), (32, 64, 128)
_FLOATS = ("F16", "BF16", "F32")
_WEIGHT, _SCALES, _BIASES = ".weight", ".scales", ".biases"
# Bytes that hold whole codes, and a word that holds as many codes, one to a byte.
_SPANS: dict[int, tuple[int, type[np.unsignedinteger[Any]]]] = {
    4: (1, np.uint16),
    5: (5, np.uint64),
    6: (3, np.uint32),
}
_CHUNK = 1 << 14  # words unpacked together: 256 KB at most, which a core's cache holds


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How one module is quantized."""

    bits: int
    group: int


class MlxSource:
    """A folder of tensors, some quantized, as a `Source`.

    Args:
        quantization: the object of that name in config.json.

    Raises:
        LoadError: a setting that is not read here, or tensors that do not fit it.
    """

    def __init__(self, files: SafetensorsFiles, quantization: Mapping[str, Any]) -> None:
        self._files, self._dense = files, DenseSource(files)
        default = _setting("quantization", quantization)
        self._settings: dict[str, Setting] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, entry in files.entries.items():
            module, _, part = name.rpartition(".")
            if f"{module}{_SCALES}" not in files.entries:
                self.shapes[name] = entry.shape
            elif part == _WEIGHT[1:]:
                own = quantization.get(module)
                setting = default if own is None else _setting(module, own)
                self._settings[name] = setting
                self.shapes[name] = _shape(files, module, setting)
            elif part not in (_SCALES[1:], _BIASES[1:]):
                self.shapes[name] = entry.shape

    @contextmanager
    def open(self) -> Iterator[TensorReader]:
        """Map the files."""
        with self._dense.open() as read_dense, self._files.open() as maps:
            yield _MlxReader(self._files, self._settings, read_dense, maps)


class _MlxReader:
    """A `TensorReader` of dense and of quantized tensors."""

    def __init__(
        self,
        files: SafetensorsFiles,
        settings: Mapping[str, Setting],
        read_dense: TensorReader,
        maps: Maps,
    ) -> None:
        self._files, self._settings = files, settings
        self._read_dense, self._maps = read_dense, maps

    def __call__(self, name: str) -> Tensor:
        if name not in self._settings:
            return self._read_dense(name)
        return self._quantized(name, slice(None))

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Return the outputs [low, high) of a matrix; the pages of those before are given back."""
        if name not in self._settings:
            return self._read_dense.rows(name, low, high)
        self._maps.forget()
        return self._quantized(name, slice(low, high))

    def _quantized(self, name: str, part: slice) -> QuantizedTensor:
        bits, module = self._settings[name].bits, name.removesuffix(_WEIGHT)
        # The matrix last: what was mapped first is given back first.
        scale, bias = (self._numbers(f"{module}{end}", part) for end in (_SCALES, _BIASES))
        packed = self._maps.raw(name, "<u4")[part].view(np.uint8)
        return QuantizedTensor(
            bits=bits, codes=unpack(packed, bits), zero=0, scale=scale, bias=bias
        )

    def _numbers(self, name: str, part: slice) -> GroupNumbers:
        dtype = self._files.entries[name].dtype
        if dtype == "BF16":
            return BFloat16(bits=self._maps.raw(name, "<u2")[part].copy())
        return self._maps.raw(name, "<f2" if dtype == "F16" else "<f4")[part].copy()


def unpack(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Unpack rows of bytes to codes, the lowest bits first; shape (N, K * bits / 8) to (N, K)."""
    if bits == 8:
        return packed
    n, width = packed.shape
    span, word = _SPANS[bits]
    codes = np.empty(packed.size // span, word)
    flat = packed.reshape(-1, span)
    for start in range(0, len(codes), _CHUNK):
        part = flat[start : start + _CHUNK]
        wide = np.zeros(len(part), word)
        wide.view(np.uint8).reshape(len(part), -1)[:, :span] = part
        out = codes[start : start + _CHUNK]
        np.bitwise_and(wide, (1 << bits) - 1, out=out)
        for place in range(1, out.itemsize):
            wide <<= word(8 - bits)
            out |= wide & word((1 << bits) - 1 << 8 * place)
    return codes.view(np.uint8).reshape(n, width * 8 // bits)


def _setting(what: str, block: Any) -> Setting:
    if not isinstance(block, Mapping):
        raise LoadError(f"config.json: {what} must be an object, got {describe(block)}")
    mode = block.get("mode", "affine")
    if mode != "affine":
        raise LoadError(f"config.json: {what}: mode must be 'affine', got {describe(mode)}")
    bits, group = block.get("bits"), block.get("group_size")
    for key, value, allowed in (("bits", bits, BITS), ("group_size", group, GROUPS)):
        if type(value) is not int or value not in allowed:
            raise LoadError(
                f"config.json: {what}: {key} must be one of {', '.join(map(str, allowed))}, "
                f"got {describe(value)}"
            )
    return Setting(bits=bits or 0, group=group or 0)


def _shape(files: SafetensorsFiles, module: str, setting: Setting) -> tuple[int, int]:
    """Return a quantized matrix's (N, K), having checked that its three tensors fit together."""
    packed = files.entries[f"{module}{_WEIGHT}"]
    if packed.dtype != "U32" or len(packed.shape) != 2:
        raise LoadError(
            f"tensor {module}{_WEIGHT} must be a U32 matrix, since there is {module}{_SCALES}, "
            f"got {packed.dtype} of shape {list(packed.shape)}"
        )
    n, width = packed.shape
    k = width * 32 // setting.bits
    expected = (n, k // setting.group)
    for end in (_SCALES, _BIASES):
        entry = files.entries.get(f"{module}{end}")
        if entry is None:
            raise LoadError(f"tensor {module}{end} is missing")
        fits = k * setting.bits == width * 32 and expected[1] * setting.group == k
        if entry.dtype not in _FLOATS or entry.shape != expected or not fits:
            raise LoadError(
                f"tensor {module}{end} must be {', '.join(_FLOATS)} of shape {list(expected)} for "
                f"{setting.bits} bits in groups of {setting.group}, "
                f"got {entry.dtype} of shape {list(entry.shape)}"
            )
    return n, k
