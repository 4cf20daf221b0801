"""The layout of a packed matrix on the GPU: which kernel reads it, and where each element lies.

The linear kernels multiply with mma.m16n8k16, weights as the A operand. A *tile* is 16 outputs, a
*chunk* 64 columns, four mma steps. K is cut into `splits` spans, a span into `warps` slices, one
for each warp, a slice into `chunks` chunks. The slices' sums are added in order, then the spans':
this cut depends on K alone, so every kernel adds alike, however it shares out the spans.

Within a chunk the order is that of use: for a lane its codes of all four steps lie together (16
bytes at 4 bits), lanes follow each other, and the groups' scales and biases come last. The same
piece of all slices of a span is one contiguous copy. Lane 4 g + t holds outputs g and g + 8. mma
does not care which columns a step multiplies as long as both operands agree, so of each run of 32
columns (16 for groups of 16) lane t takes a contiguous quarter, and inputs load as whole vectors.

Register i of A holds two columns of row g + 8 (i % 2). Its codes are, at 4 bits, nibbles
2 (i % 2) + i / 2 and 4 more of the step's word, at 8 bits bytes i % 2 and 2 more of word i / 2.

Groups of 128 are kept as two of 64. Columns and outputs are padded with zeros, scales included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor as TorchTensor

from slipstream.errors import LoadError
from slipstream.models.weights import (
    DenseTensor,
    GroupNumbers,
    QuantizedTensor,
    Tensor,
    float16_numbers,
)

TILE = 16
CHUNK = 64
GROUPS = (16, 32, 64, 128)
DENSE_KINDS = {"bf16": 16, "f16": 17, "f32": 32}
MAX_WARPS = 16  # slices that a block works on side by side
_MAX_CHUNKS = 8  # of a slice: its inputs for 16 rows take 128 registers
_SPAN_CHUNKS = 32  # of a span: its inputs for 32 rows take half of a multiprocessor's registers
_GOOD_WARPS = 12  # measured: fewer hide less latency, more have more sums to add
_SPLITS = (1, 2, 4, 6, 8, 16)
MAX_CLUSTER = 8  # the largest portable cluster
_BATCH_ROWS = 8192  # outputs packed at a time, so that packing needs little memory


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one matrix of shape (n, k) is packed.

    Attributes:
        kind: 4 or 8 for codes of that many bits, 16 bfloat16, 17 float16, 32 float32.
        group: columns that share a scale: 16, 32 or 64; 64 where dense.
        zero: the code that stands for 0 before the bias.
        has_bias: True where a scale has a bias beside it.
        splits, warps, chunks: the cut of K.
    """

    n: int
    k: int
    kind: int
    group: int
    zero: int
    has_bias: bool
    splits: int
    warps: int
    chunks: int

    @property
    def tiles(self) -> int:
        """Tiles of 16 outputs."""
        return -(-self.n // TILE)

    @property
    def quantized(self) -> bool:
        """True where elements are codes."""
        return self.kind in (4, 8)

    @property
    def code_bytes(self) -> int:
        """Bytes of a chunk's elements."""
        bits = 16 if self.kind == 17 else self.kind
        return TILE * CHUNK * bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a chunk's scales and biases."""
        if not self.quantized:
            return 0
        return CHUNK // self.group * TILE * (4 if self.has_bias else 2)

    @property
    def piece_chunks(self) -> int:
        """Chunks that are copied together: a slice, or about 4 KB where that is more."""
        most = max(1, 4096 // self.code_bytes)
        return max(
            size for size in range(1, self.chunks + 1) if self.chunks % size == 0 and size <= most
        )

    @property
    def piece_bytes(self) -> int:
        """Bytes that are copied together."""
        return self.piece_chunks * (self.code_bytes + self.scale_bytes)

    @property
    def num_chunks(self) -> int:
        """Chunks along K, padding included."""
        return self.splits * self.warps * self.chunks

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of outputs."""
        return self.num_chunks * (self.code_bytes + self.scale_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed matrix."""
        return self.tiles * self.tile_bytes

    def defines(self) -> dict[str, int]:
        """Return the macros of `linear_layout.cuh`, those of the pipeline excepted."""
        return {
            "KIND": self.kind,
            "GROUP": self.group,
            "ZERO": self.zero,
            "HAS_BIAS": int(self.has_bias),
            "CHUNKS": self.chunks,
            "WARPS": self.warps,
            "SPLITS": self.splits,
            "PIECE_CHUNKS": self.piece_chunks,
        }


def cut_columns(k: int) -> tuple[int, int, int]:
    """Return (splits, warps, chunks) for K columns: the least padding, then about 12 warps.

    A block can work on two spans side by side, so one of several spans has half the warps.

    Raises:
        LoadError: more columns than eight blocks of a cluster hold.
    """
    needed = -(-k // CHUNK)
    cuts = []
    for splits in _SPLITS:
        side = min(splits, 2)
        for chunks in range(1, _MAX_CHUNKS + 1):
            warps = -(-needed // (splits * chunks))
            if side * warps <= MAX_WARPS and warps * chunks <= _SPAN_CHUNKS:
                off = abs(side * warps - _GOOD_WARPS)
                cuts.append((splits * warps * chunks, off, splits, warps, chunks))
    if not cuts:
        most = CHUNK * _SPLITS[-1] * _SPAN_CHUNKS
        raise LoadError(f"a matrix may have up to {most} columns on cuda, got {k}")
    fewest = min(cut[2] for cut in cuts)
    # Of two as good, more warps: then fewer inputs fill a warp's registers.
    best = min((cut for cut in cuts if cut[2] == fewest), key=lambda cut: (*cut[:3], -cut[3]))
    return best[2:]


def layout_of(part: Tensor, n: int | None = None) -> Layout:
    """Return the layout of a canonical matrix, or of `n` outputs like it.

    Raises:
        LoadError: a kind of matrix that the kernels do not read.
    """
    rows, k = part.shape
    if isinstance(part, QuantizedTensor):
        if part.bits not in (4, 8) or part.group not in GROUPS:
            raise LoadError(
                "the cuda back end takes codes of 4 or 8 bits in groups of "
                f"{', '.join(map(str, GROUPS))}, got {part.bits} bits in groups of {part.group}"
            )
        if any(
            item is not None and float16_numbers(item) is None for item in (part.scale, part.bias)
        ):
            raise LoadError("the cuda back end takes float16 scales and biases alone")
        kind, group, zero = part.bits, min(part.group, CHUNK), part.zero
        has_bias = part.bias is not None
    else:
        if k % 8:
            raise LoadError(f"columns must be a multiple of 8 on cuda, got {k}")
        kind, group, zero, has_bias = DENSE_KINDS[part.dtype], CHUNK, 0, False
    splits, warps, chunks = cut_columns(k)
    return Layout(
        n=rows if n is None else n,
        k=k,
        kind=kind,
        group=group,
        zero=zero,
        has_bias=has_bias,
        splits=splits,
        warps=warps,
        chunks=chunks,
    )


def pack_parts(parts: Sequence[Tensor], layout: Layout, device: torch.device | str) -> TorchTensor:
    """Pack matrices of one kind, stacked along N, to uint8 of shape (layout.num_bytes,).

    `layout.n` is the number of their outputs together.
    """
    packed = torch.empty((layout.tiles, layout.tile_bytes), dtype=torch.uint8, device=device)
    for first in range(0, layout.n, _BATCH_ROWS):
        last = min(first + _BATCH_ROWS, layout.n)
        batch = _pack_rows(_rows(parts, first, last), layout, device)
        packed[first // TILE : first // TILE + len(batch)] = batch
    return packed.view(-1)


def _rows(parts: Sequence[Tensor], first: int, last: int) -> list[Tensor]:
    """Return the parts of rows [first, last) of the stack."""
    found: list[Tensor] = []
    start = 0
    for part in parts:
        low, high = max(first - start, 0), min(last - start, part.shape[0])
        if low < high:
            found.append(part.rows(low, high))
        start += part.shape[0]
    return found


def _pack_rows(parts: Sequence[Tensor], layout: Layout, device: torch.device | str) -> TorchTensor:
    """Pack rows to uint8 of shape (tiles, bytes of a tile)."""
    if not layout.quantized:
        values = [part.values for part in parts if isinstance(part, DenseTensor)]
        kind = np.int32 if layout.kind == 32 else np.int16
        return _finish(_place_elements(_stack(values, kind, device), layout), None, layout)
    quantized = [part for part in parts if isinstance(part, QuantizedTensor)]
    codes = _stack([part.codes for part in quantized], np.uint8, device)
    columns = [_halves([part.scale for part in quantized], layout, device)]
    if layout.has_bias:
        biases = [part.bias for part in quantized if part.bias is not None]
        columns.append(_halves(biases, layout, device))
    return _finish(_place_elements(codes, layout), torch.stack(columns, dim=-1), layout)


def _stack(
    arrays: Sequence[npt.NDArray[np.generic]], kind: type[np.generic], device: torch.device | str
) -> TorchTensor:
    """Stack matrices along N as plain integers of their width."""
    # Writeable, since torch warns of arrays that map a file.
    owned = [np.require(array, requirements=["C", "W"]) for array in arrays]
    return torch.cat([torch.from_numpy(array.view(kind)).to(device) for array in owned])


def _halves(
    numbers: Sequence[GroupNumbers], layout: Layout, device: torch.device | str
) -> TorchTensor:
    """Stack float16 matrices of shape (N, groups) as int16, groups of 128 said twice."""
    arrays = [found for item in numbers if (found := float16_numbers(item)) is not None]
    halves = _stack(arrays, np.int16, device)
    return halves.repeat_interleave(layout.k // layout.group // halves.shape[1], dim=1)


def _pad(values: TorchTensor, columns: int) -> TorchTensor:
    """Pad a matrix with zeros to whole tiles and `columns`."""
    rows = -len(values) % TILE
    return torch.nn.functional.pad(values, (0, columns - values.shape[1], 0, rows))


def _place_elements(values: TorchTensor, layout: Layout) -> TorchTensor:
    """Bring elements into the order of use: bytes of shape (tiles, chunks, code_bytes)."""
    values = _pad(values, layout.num_chunks * CHUNK)
    tiles = len(values) // TILE
    if layout.group == 16:  # a run is one step
        values = values.view(tiles, 2, 8, layout.num_chunks, 4, 1, 4, 1, 2, 2)
    else:  # a run is two steps
        values = values.view(tiles, 2, 8, layout.num_chunks, 2, 1, 4, 2, 2, 2)
    # Now (tile, lower, g, chunk, run, 1, t, step in run, high, odd). In the kernels' words register
    # i of A is 2 high + lower, its two elements are odd 0 and 1.
    if layout.kind == 4:
        # chunk, lane, step, odd, lower, high
        nibbles = values.permute(0, 3, 2, 6, 4, 7, 9, 1, 8, 5)
        pairs = nibbles.reshape(tiles, layout.num_chunks, 512, 2)
        return pairs[..., 0] | (pairs[..., 1] << 4)
    if layout.kind == 8:
        steps = values.permute(0, 3, 4, 7, 2, 6, 8, 9, 1, 5)  # chunk, step, lane, high, odd, lower
        steps = steps.reshape(tiles, layout.num_chunks, 2, 2, 32, 8).transpose(3, 4)
        return steps.reshape(tiles, layout.num_chunks, layout.code_bytes)
    if layout.kind == 32:
        steps = values.permute(0, 3, 4, 7, 8, 2, 6, 1, 9, 5)  # chunk, step, high, lane, lower, odd
    else:
        steps = values.permute(0, 3, 4, 7, 2, 6, 8, 1, 9, 5)  # chunk, step, lane, high, lower, odd
    return steps.contiguous().view(torch.uint8).reshape(tiles, layout.num_chunks, layout.code_bytes)


def _finish(codes: TorchTensor, scales: TorchTensor | None, layout: Layout) -> TorchTensor:
    """Put each piece's scales, int16 of shape (N, groups, 1 or 2), behind its codes."""
    tiles = len(codes)
    if scales is None:
        return _order_pieces([codes], layout)
    width = scales.shape[2]
    flat = _pad(scales.flatten(1), layout.num_chunks * CHUNK // layout.group * width)
    placed = flat.view(tiles, 2, 8, layout.num_chunks, CHUNK // layout.group, width)
    placed = (
        placed.permute(0, 3, 4, 2, 1, 5).contiguous().view(torch.uint8)
    )  # chunk, group, g, lower
    return _order_pieces([codes, placed], layout)


def _order_pieces(parts: Sequence[TorchTensor], layout: Layout) -> TorchTensor:
    """Join what belongs to a piece, and bring the same piece of all slices of a span together."""
    pieces = layout.chunks // layout.piece_chunks
    shape = (len(parts[0]), layout.splits, layout.warps, pieces, -1)
    joined = torch.cat([part.reshape(shape) for part in parts], dim=4)
    return joined.transpose(2, 3).reshape(len(joined), -1)
