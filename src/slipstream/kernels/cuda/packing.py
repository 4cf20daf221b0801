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

At 5 and 6 bits a chunk's nibbles come first, as at 4, then what is above them: a lane's bits of all
steps in one word or two, register i of step s in field 4 s + i of each half.

Scales of two levels are kept as such: the large numbers of 256 columns in each chunk, then the
small ones, those of rows g and g + 8 side by side.

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
    BFloat16,
    DenseTensor,
    GroupNumbers,
    QuantizedTensor,
    Tensor,
    TwoLevel,
    float16_numbers,
)

TILE = 16
CHUNK = 64
GROUPS = (16, 32, 64, 128)
DENSE_KINDS = {"bf16": 16, "f16": 17, "f32": 32}
CODE_BITS = (4, 5, 6, 8)
TWO_LEVELS = 2  # kind of scale; others are those of dense numbers
SUPER_COLUMNS = 256  # that share the larger number of two
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
        kind: 4, 5, 6 or 8 for codes of that many bits, 16 bfloat16, 17 float16, 32 float32.
        group: columns that share a scale: 16, 32 or 64; 64 where dense.
        zero: the code that stands for 0 before the bias.
        has_bias: True where a scale has a bias beside it.
        scale: kind of scales and biases: 16 bfloat16, 17 float16, or TWO_LEVELS.
        splits, warps, chunks: the cut of K.
    """

    n: int
    k: int
    kind: int
    group: int
    zero: int
    has_bias: bool
    scale: int = DENSE_KINDS["f16"]
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
        return self.kind in CODE_BITS

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
        groups, pair = CHUNK // self.group, TILE * (4 if self.has_bias else 2)
        if self.scale == TWO_LEVELS:
            return pair + groups * TILE * (12 if self.has_bias else 8) // 8
        return groups * pair

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
            "SCALE": self.scale,
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
        if part.bits not in CODE_BITS or part.group not in GROUPS:
            raise LoadError(
                "the cuda back end takes codes of 4, 5, 6 or 8 bits in groups of "
                f"{', '.join(map(str, GROUPS))}, got {part.bits} bits in groups of {part.group}"
            )
        scale = _scale_kind(part)
        kind, group, zero = part.bits, min(part.group, CHUNK), part.zero
        has_bias = part.bias is not None
    else:
        if k % 8:
            raise LoadError(f"columns must be a multiple of 8 on cuda, got {k}")
        kind, group, zero, has_bias = DENSE_KINDS[part.dtype], CHUNK, 0, False
        scale = DENSE_KINDS["f16"]
    splits, warps, chunks = cut_columns(k)
    return Layout(
        n=rows if n is None else n,
        k=k,
        kind=kind,
        group=group,
        zero=zero,
        has_bias=has_bias,
        scale=scale,
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
        return _order_pieces([_place_elements(_stack(values, kind, device), layout)], layout)
    quantized = [part for part in parts if isinstance(part, QuantizedTensor)]
    codes = _place_elements(_stack([part.codes for part in quantized], np.uint8, device), layout)
    numbers = [[part.scale for part in quantized]]
    if layout.has_bias:
        numbers.append([part.bias for part in quantized if part.bias is not None])
    place = _place_two_levels if layout.scale == TWO_LEVELS else _place_scales
    return _order_pieces([codes, place(numbers, layout, device)], layout)


def _scale_kind(part: QuantizedTensor) -> int:
    """Return the kind of a matrix's scales and biases.

    Raises:
        LoadError: one that the kernels do not read.
    """
    found = {_number_kind(item) for item in (part.scale, part.bias) if item is not None}
    two_levels = found == {TWO_LEVELS}
    # Of two levels the kernels read those that the K-quants have.
    shape = (part.bits, part.group, part.bias is not None)
    if (
        len(found) != 1
        or 0 in found
        or (two_levels and shape not in ((4, 32, True), (5, 32, True), (6, 16, False)))
    ):
        raise LoadError(
            "the cuda back end takes scales and biases of float16 or bfloat16, or of two levels "
            f"as Q4_K, Q5_K and Q6_K have them, got others of {part.bits} bits in groups of "
            f"{part.group}"
        )
    return found.pop()


def _number_kind(numbers: GroupNumbers) -> int:
    if isinstance(numbers, TwoLevel):
        return TWO_LEVELS
    if isinstance(numbers, BFloat16):
        return DENSE_KINDS["bf16"]
    return DENSE_KINDS["f16"] if float16_numbers(numbers) is not None else 0


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
    """Stack 16-bit numbers of shape (N, groups) as int16, groups of 128 said twice."""
    arrays = [
        item.bits if isinstance(item, BFloat16) else float16_numbers(item) for item in numbers
    ]
    halves = _stack([array for array in arrays if array is not None], np.int16, device)
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
        return _place_nibbles(values, layout)
    if layout.kind in (5, 6):
        return _place_split_codes(values, layout)
    if layout.kind == 8:
        steps = values.permute(0, 3, 4, 7, 2, 6, 8, 9, 1, 5)  # chunk, step, lane, high, odd, lower
        steps = steps.reshape(tiles, layout.num_chunks, 2, 2, 32, 8).transpose(3, 4)
        return steps.reshape(tiles, layout.num_chunks, layout.code_bytes)
    if layout.kind == 32:
        steps = values.permute(0, 3, 4, 7, 8, 2, 6, 1, 9, 5)  # chunk, step, high, lane, lower, odd
    else:
        steps = values.permute(0, 3, 4, 7, 2, 6, 8, 1, 9, 5)  # chunk, step, lane, high, lower, odd
    return steps.contiguous().view(torch.uint8).reshape(tiles, layout.num_chunks, layout.code_bytes)


def _place_nibbles(values: TorchTensor, layout: Layout) -> TorchTensor:
    """Bring codes of 4 bits, with dimensions as in `_place_elements`, into the order of use."""
    nibbles = values.permute(0, 3, 2, 6, 4, 7, 9, 1, 8, 5)  # chunk, lane, step, odd, lower, high
    pairs = nibbles.reshape(len(values), layout.num_chunks, 512, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _place_split_codes(values: TorchTensor, layout: Layout) -> TorchTensor:
    """The same for codes of 5 and 6 bits: nibbles, then a lane's bits above them."""
    above = (values >> 4).permute(0, 3, 2, 6, 4, 7, 5, 9, 8, 1)  # chunk, lane, step, odd, register
    bits = layout.kind - 4
    above = above.reshape(len(values), layout.num_chunks, 32, bits, 4 // bits, 2, 4).int()
    step, odd, register = torch.meshgrid(
        *(torch.arange(size, device=values.device) for size in (4 // bits, 2, 4)), indexing="ij"
    )
    places = 16 * odd + bits * (4 * step + register)
    words = (above.long() << places).sum(dim=(4, 5, 6)).to(torch.int32)  # of a lane: one or two
    fields = words.contiguous().view(torch.uint8).reshape(len(values), layout.num_chunks, -1)
    return torch.cat([_place_nibbles(values & 15, layout), fields], dim=2)


def _place_scales(
    numbers: Sequence[Sequence[GroupNumbers]], layout: Layout, device: torch.device | str
) -> TorchTensor:
    """Bring scales, and biases if any, into the order of use: bytes by tile and chunk."""
    scales = torch.stack([_halves(each, layout, device) for each in numbers], dim=-1)
    return _by_chunks(scales, layout, CHUNK // layout.group)


def _place_two_levels(
    numbers: Sequence[Sequence[GroupNumbers]], layout: Layout, device: torch.device | str
) -> TorchTensor:
    """The same for scales of two levels."""
    levels = [[item for item in each if isinstance(item, TwoLevel)] for each in numbers]
    supers = torch.stack(
        [_stack([item.super for item in each], np.int16, device) for each in levels], dim=-1
    ).repeat_interleave(SUPER_COLUMNS // CHUNK, dim=1)
    placed = [_by_chunks(supers, layout, 1)]
    small = [_stack([item.small for item in each], np.uint8, device) for each in levels]
    groups = CHUNK // layout.group
    if not layout.has_bias:
        placed.append(_by_chunks(small[0][..., None], layout, groups))
    else:
        pairs = small[0].int() | small[1].int() << 6
        both = _by_rows(pairs[..., None], layout, groups)[..., 0]  # tile, chunk, group, g, lower
        words = both[..., 0] | both[..., 1] << 12
        shape = (len(words), layout.num_chunks, -1)
        low = (words & 0xFFFF).to(torch.int32).contiguous().view(torch.uint8)
        low = low.view(*words.shape, 4)[..., :2]
        high = (words >> 16).to(torch.uint8)
        placed += [low.reshape(shape), high.reshape(shape)]
    return torch.cat(placed, dim=2)


def _by_rows(values: TorchTensor, layout: Layout, each: int) -> TorchTensor:
    """Return numbers of shape (N, `each` a chunk, width) by tile, chunk, number, g, lower."""
    flat = _pad(values.flatten(1), layout.num_chunks * each * values.shape[2])
    placed = flat.view(len(flat) // TILE, 2, 8, layout.num_chunks, each, values.shape[2])
    return placed.permute(0, 3, 4, 2, 1, 5)


def _by_chunks(values: TorchTensor, layout: Layout, each: int) -> TorchTensor:
    """The same, as bytes of shape (tiles, chunks, bytes of a chunk)."""
    rows = _by_rows(values, layout, each).contiguous().view(torch.uint8)
    return rows.reshape(len(rows), layout.num_chunks, -1)


def _order_pieces(parts: Sequence[TorchTensor], layout: Layout) -> TorchTensor:
    """Join what belongs to a piece, and bring the same piece of all slices of a span together."""
    pieces = layout.chunks // layout.piece_chunks
    shape = (len(parts[0]), layout.splits, layout.warps, pieces, -1)
    joined = torch.cat([part.reshape(shape) for part in parts], dim=4)
    return joined.transpose(2, 3).reshape(len(joined), -1)
