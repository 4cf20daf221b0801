"""Launches the linear kernels of one layout: grids, shared memory, and which constants they need.

Sizes of shared arrays are said twice, here and in the sources that carve them up, under one name.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import Tensor as TorchTensor

from slipstream.kernels.cuda import compiler
from slipstream.kernels.cuda.compiler import SOURCES, Device, Kernel
from slipstream.kernels.cuda.layout import CHUNK, MAX_CLUSTER, TILE, Layout
from slipstream.kernels.cuda.linear_builds import RowsBuild, choose_rows_build
from slipstream.kernels.cuda.linear_teams import (
    TeamBuild,
    choose_team_build,
    has_teams,
    team_grid,
    teams_are_quicker,
)

TILE_ROWS = (16, 32, 64, 128)
_FEWEST_TILE_STAGES = 3  # one multiplied, one prepared, one under way
_MAX_TILE_STAGES = 4
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
        self._rows: dict[RowsBuild, tuple[Kernel, int]] = {}
        self._teams: dict[TeamBuild, tuple[Kernel, int]] = {}
        self._tiles: dict[int, Kernel] = {}

    @property
    def has_teams(self) -> bool:
        """True where `multirow` serves many rows by teams of warps."""
        return has_teams(self._device)

    def multirow(
        self,
        packed: TorchTensor,
        x: TorchTensor,
        out: TorchTensor,
        residual: TorchTensor | None,
        num_rows: int,
        *,
        one_row: bool,
        build: RowsBuild | None = None,
    ) -> None:
        """Launch `multirow`, or `gemv` where each row is to read the weights anew."""
        layout, device = self._layout, self._device
        if build is None and not one_row and teams_are_quicker(layout, device, num_rows):
            team_build = choose_team_build(layout, device, num_rows)
            if team_build is not None:
                self.teams(packed, x, out, residual, num_rows, team_build)
                return
        build = build or choose_rows_build(layout, device, 1 if one_row else num_rows)
        rows_per_pass = 1 if one_row else build.tiles * 8
        if build not in self._rows:
            self._rows[build] = self._load_rows(build)
        kernel, workers = self._rows[build]
        step = layout.n
        if not build.adds_all(layout):
            step = workers * build.most_sums(layout, device) * TILE
        for first in range(0, layout.n, step):
            n = min(step, layout.n - first)
            kernel.launch(
                (min(workers, -(-n // TILE)) * build.blocks, -(-num_rows // rows_per_pass), 1),
                (build.threads(layout), 1, 1),
                [
                    packed[first // TILE * layout.tile_bytes :],
                    x,
                    out[:, first:],
                    None if residual is None else residual[:, first:],
                    n,
                    layout.k,
                    out.stride(0),
                    _stride(residual),
                    num_rows,
                    rows_per_pass,
                ],
                cluster=build.blocks,
                overlap=self._device.has_clusters,
            )

    def teams(
        self,
        packed: TorchTensor,
        x: TorchTensor,
        out: TorchTensor,
        residual: TorchTensor | None,
        num_rows: int,
        build: TeamBuild,
    ) -> None:
        """Launch `multirow` by teams of warps, on a device that has them."""
        if build not in self._teams:
            self._teams[build] = self._load_teams(build)
        kernel, workers = self._teams[build]
        kernel.launch(
            (workers * build.blocks, -(-num_rows // (build.tiles * 8)), 1),
            (build.threads, 1, 1),
            self._arguments(packed, x, out, residual, num_rows),
            cluster=build.blocks,
            overlap=True,
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
            (tiles * self._tile_blocks, -(-num_rows // tile_m), 1),
            (_OUTPUT_WARPS * 32 * max(1, tile_m // _WARP_ROWS), 1, 1),
            self._arguments(packed, x, out, residual, num_rows),
            cluster=self._tile_blocks,
            overlap=self._device.has_clusters,
        )

    def embed(
        self,
        packed: TorchTensor,
        token_ids: TorchTensor,
        out: TorchTensor,
        num_rows: int,
        scale: float,
    ) -> None:
        """Launch `embed`."""
        kernel = self._compile(self.embed_build()).kernel("embed")
        kernel.launch(
            (num_rows, 1, 1),
            (_EMBED_THREADS, 1, 1),
            [packed, token_ids, out, self._layout.k, scale],
            overlap=self._device.has_clusters,
        )

    def rows_source(self, build: RowsBuild) -> Build:
        """Return what `multirow` and `gemv` are compiled from."""
        macros = self._macros(
            BLOCKS=build.blocks,
            SIDE=build.side,
            STAGES=build.fitting_stages(self._layout, self._device),
        )
        return "linear_rows.cu", (f"multirow<{build.tiles}>",), macros

    def teams_source(self, build: TeamBuild) -> Build:
        """Return what `multirow` by teams is compiled from, for sm_90a."""
        layout, device = self._layout, self._device
        macros = self._macros(
            BLOCKS=build.blocks,
            SIDE=1,
            STAGES=build.fitting_stages(layout, device),
            TEAMS=build.teams,
            SLOTS=build.slots(layout, device),
        )
        return "linear_teams.cu", (f"team_rows<{build.tiles}>",), macros

    def tile_build(self, tile_m: int) -> Build:
        """Return what `tile` is compiled from."""
        macros = self._macros(
            BLOCKS=self._tile_blocks, SIDE=1, TILE_STAGES=self._tile_stages(tile_m)
        )
        return "linear_tile.cu", (f"tile<{tile_m}>",), macros

    def embed_build(self) -> Build:
        """Return what `embed` is compiled from."""
        return "linear_embed.cu", ("embed",), self._macros(BLOCKS=1, SIDE=1)

    def _load_rows(self, build: RowsBuild) -> tuple[Kernel, int]:
        """Return a build's kernel, and how many workers share the outputs."""
        layout, device = self._layout, self._device
        module = self._compile(self.rows_source(build))
        shared = build.shared_bytes(layout, device, build.fitting_stages(layout, device))
        kernel = module.kernel(f"multirow<{build.tiles}>", shared_bytes=shared)
        workers = device.processors // build.blocks
        if build.blocks > 1:  # a multiprocessor short of a whole cluster stays idle
            workers = min(workers, kernel.max_clusters(build.threads(layout), build.blocks))
        return kernel, min(workers, layout.tiles)

    def _load_teams(self, build: TeamBuild) -> tuple[Kernel, int]:
        """Return a build's kernel, and how many workers share the outputs."""
        layout, device = self._layout, self._device
        module = self._compile(self.teams_source(build), arch=f"{device.arch}a")
        shared = build.shared_bytes(layout, device, build.fitting_stages(layout, device))
        kernel = module.kernel(f"team_rows<{build.tiles}>", shared_bytes=shared)
        workers = device.processors // build.blocks
        if build.blocks > 1:
            workers = min(workers, kernel.max_clusters(build.threads, build.blocks))
        return kernel, team_grid(layout, workers)

    def _tile_stages(self, tile_m: int) -> int:
        for stages in range(_MAX_TILE_STAGES, _FEWEST_TILE_STAGES, -1):
            if self._tile_shared_bytes(tile_m, stages) <= self._device.shared_bytes:
                return stages
        return _FEWEST_TILE_STAGES

    def _tile_shared_bytes(self, tile_m: int, stages: int) -> int:
        layout = self._layout
        stage = _OUTPUT_WARPS * (layout.code_bytes + layout.scale_bytes) + tile_m * CHUNK * 2
        input_sums = 2 * self._groups * tile_m * 4
        spans = layout.splits // self._tile_blocks if self._tile_blocks > 1 else 0
        block_sums = spans * tile_m * _OUTPUT_WARPS * TILE * 4
        return stages * stage + input_sums + block_sums

    @property
    def _tile_blocks(self) -> int:
        """Blocks of a cluster of `tile`; a pair of spans is no reason for one."""
        splits = self._layout.splits
        if not self._device.has_clusters or splits <= 2:
            return 1
        return max(size for size in range(1, MAX_CLUSTER + 1) if splits % size == 0)

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
        sizes = (layout.n, layout.k, out.stride(0), _stride(residual), num_rows)
        return [packed, x, out, residual, *sizes]

    def _compile(self, build: Build, arch: str | None = None) -> compiler.Module:
        return _compiled(build, self._cubins, arch)


def _stride(residual: TorchTensor | None) -> int:
    """Return the columns between rows of what is added; 0 where all rows share one."""
    return 0 if residual is None else residual.stride(0)


@cache
def _compiled(build: Build, cubins: Path | None, arch: str | None) -> compiler.Module:
    source, names, macros = build
    return compiler.compile_kernels(
        SOURCES / source, names=names, defines=dict(macros), arch=arch, cache=cubins
    )
