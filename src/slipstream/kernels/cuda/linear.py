"""y = x W^T on the GPU, row-invariant, through three kernels that share one inner product.

`gemv` reads the weights for each row, `multirow` once for up to 32 rows, `tile` once for a tile of
16 to 128 rows. Which one runs changes the clock, never a byte: instruction, order along K, the cut
of K and the order in which partial sums are added follow from the weight's layout alone.

The kernels are compiled for each layout's constants at first use (a model has four or five). They
may start while the stream's previous kernel still runs: weights are fetched at once, inputs,
residual and output are touched only after that kernel is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor as TorchTensor

from slipstream.errors import ConfigError, LoadError
from slipstream.kernels.cuda.compiler import current_device
from slipstream.kernels.cuda.layout import Layout, layout_of
from slipstream.kernels.cuda.linear_kernels import TILE_ROWS, LinearKernels
from slipstream.kernels.cuda.packing import pack_parts
from slipstream.models.weights import Tensor

KERNELS = ("auto", "gemv", "multirow", "tile")
MULTIROW_ROWS = 64  # up to here passes of 16 rows are quicker than a tile, where there are no teams


@dataclass(frozen=True)
class Segment:
    """Outputs [first, first + layout.n) of a weight, all of one kind."""

    layout: Layout
    first: int
    packed: TorchTensor
    kernels: LinearKernels


@dataclass(frozen=True)
class CudaWeight:
    """A packed matrix of n outputs by k inputs, in one segment for each run of parts of a kind."""

    n: int
    k: int
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that the weight takes on the device."""
        return sum(segment.layout.num_bytes for segment in self.segments)


def pack(
    parts: Sequence[Tensor], device: torch.device | str = "cuda", *, cubins: Path | None = None
) -> CudaWeight:
    """Pack matrices of equal K, stacked along N in order, and compile what multiplies them.

    Args:
        parts: quantized or dense matrices of shape (N_i, K), kinds mixed as one likes.
        device: where the weight lives.
        cubins: folder of compiled kernels; None compiles anew.

    Raises:
        LoadError: unequal K, or a kind that the kernels do not read.
    """
    columns = {part.shape[1] for part in parts}
    if len(columns) != 1:
        raise LoadError(f"fused matrices must have one width, got {sorted(columns)}")
    segments = []
    first = 0
    for _, run in groupby(parts, key=lambda part: layout_of(part, 0)):
        alike = list(run)
        layout = layout_of(alike[0], sum(part.shape[0] for part in alike))
        packed = pack_parts(alike, layout, device)
        segments.append(
            Segment(layout, first, packed, LinearKernels(layout, current_device(), cubins))
        )
        first += layout.n
    return CudaWeight(n=first, k=columns.pop(), segments=tuple(segments))


def linear(
    x: TorchTensor,
    weight: CudaWeight,
    out: TorchTensor,
    residual: TorchTensor | None = None,
    *,
    num_rows: int,
    kernel: str = "auto",
    tile_m: int = 16,
) -> None:
    """Write x @ weight.T, plus residual if given, to the first `num_rows` rows of `out`.

    Args:
        x: bfloat16 of shape (max_rows, K), contiguous.
        weight: N by K.
        out: float32 of shape (max_rows, N), contiguous.
        residual: float32 of shape (max_rows, N), contiguous; may be `out`. Or of shape (1, N): a
            bias that is added to every row.
        num_rows: rows to compute; the others of `out` stay as they are.
        kernel: one of KERNELS; the bytes are the same.
        tile_m: rows that share one read of the weights in `tile`, one of TILE_ROWS.

    Raises:
        ConfigError: an unknown kernel or tile.
    """
    if kernel not in KERNELS:
        raise ConfigError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel}")
    if tile_m not in TILE_ROWS:
        raise ConfigError(f"tile_m must be one of {', '.join(map(str, TILE_ROWS))}, got {tile_m}")
    _check(x, torch.bfloat16, weight.k, num_rows, "x")
    _check(out, torch.float32, weight.n, num_rows, "out")
    if residual is not None and len(residual) > 1:
        _check(residual, torch.float32, weight.n, num_rows, "residual")
    elif residual is not None:
        _check(residual, torch.float32, weight.n, 1, "bias")
        residual = residual.expand(num_rows, -1)
    if kernel == "auto":
        kernel, tile_m = choose_kernel(num_rows, tile_m, teams=weight.segments[0].kernels.has_teams)
    for segment in weight.segments:
        last = segment.first + segment.layout.n
        into = out[:, segment.first : last]
        beside = None if residual is None else residual[:, segment.first : last]
        if kernel == "tile":
            segment.kernels.tile(segment.packed, x, into, beside, num_rows, tile_m)
        else:
            one_row = kernel == "gemv"
            segment.kernels.multirow(segment.packed, x, into, beside, num_rows, one_row=one_row)


def embed(
    token_ids: TorchTensor,
    weight: CudaWeight,
    out: TorchTensor,
    *,
    num_rows: int,
    scale: float = 1.0,
) -> None:
    """Write rows `token_ids` of a weight of one segment to `out`, dequantized exactly, then scaled.

    Args:
        token_ids: int32 of shape (max_rows,), each in [0, N).
        out: float32 of shape (max_rows, K), contiguous.
    """
    (segment,) = weight.segments
    _check(out, torch.float32, weight.k, num_rows, "out")
    assert token_ids.dtype == torch.int32, "token ids are int32"
    segment.kernels.embed(segment.packed, token_ids, out, num_rows, scale)


def choose_kernel(num_rows: int, tile_m: int, *, teams: bool) -> tuple[str, int]:
    """Return the kernel and tile that serve `num_rows` rows best, as measured on an H200.

    Args:
        teams: `multirow` serves many rows by teams of warps, which are quicker than any tile.
    """
    if teams or num_rows <= MULTIROW_ROWS:
        return "multirow", tile_m
    return "tile", 32


def _check(values: TorchTensor, dtype: torch.dtype, columns: int, rows: int, name: str) -> None:
    """Assert what the kernels take for granted."""
    assert values.dtype == dtype, f"{name} must be {dtype}, got {values.dtype}"
    assert values.shape[1] == columns, f"{name} must have {columns} columns, got {values.shape[1]}"
    assert values.shape[0] >= rows, f"{name} must have {rows} rows, got {values.shape[0]}"
    assert values.stride() == (columns, 1), f"{name} must be contiguous"
