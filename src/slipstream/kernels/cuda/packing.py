"""Pack canonical matrices into the layout that the linear kernels read; see `layout`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor as TorchTensor

from slipstream.kernels.cuda.layout import (
    CHUNK,
    SUPER_COLUMNS,
    TILE,
    TWO_LEVELS,
    Layout,
)
from slipstream.models.weights import (
    BFloat16,
    DenseTensor,
    GroupNumbers,
    QuantizedTensor,
    Tensor,
    TwoLevel,
    float16_numbers,
)

_BATCH_ROWS = 8192  # outputs packed at a time, so that packing needs little memory


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
