"""Launches the linear kernels of one layout: grids, shared memory, and which constants they need.

Sizes of shared arrays are said twice, here and in the sources that carve them up, under one name.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import Tensor as TorchTensor

from slipstream.kernels.cuda import compiler
from slipstream.kernels.cuda.compiler import SOURCES, Device, Kernel
from slipstream.kernels.cuda.packing import CHUNK, TILE, Layout

TILE_ROWS = (16, 32, 64, 128)
_MAX_STAGES = 3  # of the ring; measured: more delay the inputs by more than they hide
_MOST_SUMS = 16  # tiles whose sums a block keeps until the cluster meets
_FEWEST_TILE_STAGES = 3  # one multiplied, one prepared, one under way
_MAX_TILE_STAGES = 4
_SLOT_ROW = 20  # linear_rows.cu
_OUTPUT_WARPS = 4  # linear_tile.cu
_WARP_ROWS = 32  # linear_tile.cu
_EMBED_THREADS = 256

Build = tuple[str, tuple[str, ...], tuple[tuple[str, int], ...]]  # source, names, macros


class LinearKernels:
    """The kernels of one layout on one device, compiled at first use.

    Args:
        cubins: folder of compiled kernels; None compiles anew.
    """

    def __init__(self, layout: Layout, device: Device, cubins: Path | None) -> None:
        self._layout = layout
        self._device = device
        self._cubins = cubins
        self._blocks = layout.splits if device.has_clusters else 1  # that share a tile of outputs
        self._rows: dict[int, tuple[Kernel, int]] = {}
        self._tiles: dict[int, Kernel] = {}

    def multirow(
        self,
        packed: TorchTensor,
        x: TorchTensor,
        out: TorchTensor,
        residual: TorchTensor | None,
        num_rows: int,
        *,
        one_row: bool,
    ) -> None:
        """Launch `multirow`, or `gemv` where each row is to read the weights anew."""
        tiles = 1 if one_row or num_rows <= 8 else 2
        rows_per_pass = 1 if one_row else tiles * 8
        if tiles not in self._rows:
            self._rows[tiles] = self._load_rows(tiles)
        kernel, workers = self._rows[tiles]
        layout = self._layout
        step = workers * _MOST_SUMS * TILE if layout.splits > 1 else layout.n
        for first in range(0, layout.n, step):
            n = min(step, layout.n - first)
            kernel.launch(
                (min(workers, -(-n // TILE)) * self._blocks, -(-num_rows // rows_per_pass), 1),
                (self._rows_threads, 1, 1),
                [
                    packed[first // TILE * layout.tile_bytes :],
                    x,
                    out[:, first:],
                    None if residual is None else residual[:, first:],
                    n,
                    layout.k,
                    out.stride(0),
                    num_rows,
                    rows_per_pass,
                ],
                cluster=self._blocks,
                overlap=self._device.has_clusters,
            )

    def tile(
        self,
        packed: TorchTensor,
        x: TorchTensor,
        out: TorchTensor,
        residual: TorchTensor | None,
        num_rows: int,
        tile_m: int,
    ) -> None:
        """Launch `tile`, of fewer rows where shared memory does not suffice."""
        while self._tile_shared_bytes(tile_m, _FEWEST_TILE_STAGES) > self._device.shared_bytes:
            tile_m //= 2
        if tile_m not in self._tiles:
            module = self._compile(self.tile_build(tile_m))
            shared = self._tile_shared_bytes(tile_m, self._tile_stages(tile_m))
            self._tiles[tile_m] = module.kernel(f"tile<{tile_m}>", shared_bytes=shared)
        tiles = -(-self._layout.tiles // _OUTPUT_WARPS)
        self._tiles[tile_m].launch(
            (tiles * self._blocks, -(-num_rows // tile_m), 1),
            (_OUTPUT_WARPS * 32 * max(1, tile_m // _WARP_ROWS), 1, 1),
            self._arguments(packed, x, out, residual, num_rows),
            cluster=self._blocks,
            overlap=self._device.has_clusters,
        )

    def embed(
        self, packed: TorchTensor, token_ids: TorchTensor, out: TorchTensor, num_rows: int
    ) -> None:
        """Launch `embed`."""
        kernel = self._compile(self.embed_build()).kernel("embed")
        kernel.launch(
            (num_rows, 1, 1),
            (_EMBED_THREADS, 1, 1),
            [packed, token_ids, out, self._layout.k],
            overlap=self._device.has_clusters,
        )

    def rows_build(self, tiles: int) -> Build:
        """Return what `multirow` and `gemv` are compiled from, for `tiles` tiles of 8 rows."""
        macros = self._macros(STAGES=self._stages(tiles))
        return "linear_rows.cu", (f"multirow<{tiles}>",), macros

    def tile_build(self, tile_m: int) -> Build:
        """Return what `tile` is compiled from."""
        macros = self._macros(TILE_STAGES=self._tile_stages(tile_m))
        return "linear_tile.cu", (f"tile<{tile_m}>",), macros

    def embed_build(self) -> Build:
        """Return what `embed` is compiled from."""
        return "linear_embed.cu", ("embed",), self._macros()

    def _load_rows(self, tiles: int) -> tuple[Kernel, int]:
        """Return the kernel for `tiles` tiles of 8 rows, and how many workers share the outputs."""
        module = self._compile(self.rows_build(tiles))
        shared = self._rows_shared_bytes(tiles, self._stages(tiles))
        kernel = module.kernel(f"multirow<{tiles}>", shared_bytes=shared)
        workers = self._device.processors // self._blocks
        if self._blocks > 1:  # a multiprocessor short of a whole cluster stays idle
            workers = min(workers, kernel.max_clusters(self._rows_threads, self._blocks))
        return kernel, min(workers, self._layout.tiles)

    @property
    def _rows_threads(self) -> int:
        """Threads of a block: the slices' warps, one that copies and one that adds."""
        return (self._layout.warps + 2) * 32

    def _stages(self, tiles: int) -> int:
        """Return the stages of the ring, as shared memory allows."""
        for stages in range(_MAX_STAGES, 1, -1):
            if self._rows_shared_bytes(tiles, stages) <= self._device.shared_bytes:
                return stages
        return 1

    def _rows_shared_bytes(self, tiles: int, stages: int) -> int:
        layout = self._layout
        ring = stages * (layout.warps * layout.piece_bytes + 16) + 32  # and their barriers
        slots = 2 * layout.warps * tiles * 8 * _SLOT_ROW * 4
        input_sums = layout.warps * layout.chunks * self._groups * tiles * 8 * 4
        if layout.splits == 1:
            return ring + slots + input_sums
        own_splits = layout.splits // self._blocks
        return ring + slots + input_sums + own_splits * _MOST_SUMS * tiles * 8 * TILE * 4

    def _tile_stages(self, tile_m: int) -> int:
        for stages in range(_MAX_TILE_STAGES, _FEWEST_TILE_STAGES, -1):
            if self._tile_shared_bytes(tile_m, stages) <= self._device.shared_bytes:
                return stages
        return _FEWEST_TILE_STAGES

    def _tile_shared_bytes(self, tile_m: int, stages: int) -> int:
        layout = self._layout
        stage = _OUTPUT_WARPS * (layout.code_bytes + layout.scale_bytes) + tile_m * CHUNK * 2
        input_sums = 2 * self._groups * tile_m * 4
        block_sums = tile_m * _OUTPUT_WARPS * TILE * 4 if layout.splits > 1 else 0
        return stages * stage + input_sums + block_sums

    @property
    def _groups(self) -> int:
        """Groups of a chunk."""
        return CHUNK // self._layout.group

    def _macros(self, **pipeline: int) -> tuple[tuple[str, int], ...]:
        return tuple(sorted({**self._layout.defines(), **pipeline}.items()))

    def _arguments(
        self,
        packed: TorchTensor,
        x: TorchTensor,
        out: TorchTensor,
        residual: TorchTensor | None,
        num_rows: int,
    ) -> list[TorchTensor | int | None]:
        layout = self._layout
        return [packed, x, out, residual, layout.n, layout.k, out.stride(0), num_rows]

    def _compile(self, build: Build) -> compiler.Module:
        return _compiled(build, self._cubins)


@cache
def _compiled(build: Build, cubins: Path | None) -> compiler.Module:
    source, names, macros = build
    return compiler.compile_kernels(
        SOURCES / source, names=names, defines=dict(macros), cache=cubins
    )
