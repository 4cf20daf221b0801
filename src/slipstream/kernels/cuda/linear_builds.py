"""How `multirow` shares a matrix out among blocks, turns and warps: what fits, and what is best.

Spans of K (layout.py) are worked on side by side in a block, by the blocks of a cluster, or in
turn. More rows in one read of the weights want more registers for inputs, so wider builds hold
fewer spans at a time. Every build adds the same sums in the same order: the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from slipstream.kernels.cuda.compiler import Device
from slipstream.kernels.cuda.layout import CHUNK, MAX_CLUSTER, MAX_WARPS, TILE, Layout

ROWS = 8  # of a tile of inputs
MAX_TILES = 4  # that share a read
# Of the ring; measured: more delay the inputs by more than they hide, but for small matrices.
MAX_STAGES, SMALL_STAGES = 3, 5
_SMALL_ROUNDS = 2  # tiles of a small matrix for each multiprocessor: half of K then arrives sooner
_GOOD_STAGES = 2  # with one, copies and products take turns
_MOST_SUMS = 16  # tiles whose sums a block keeps until all spans are there
# Where that takes more launches than this, reading the weights once more is quicker.
_FEW_LAUNCHES = 2
_SERVICE_WARPS = 2  # one copies, one adds
_SLOT_ROW = 20  # linear_rows.cu
_SCHEDULERS = 4  # of a multiprocessor; warps are dealt out to them
_SCHEDULER_REGISTERS = 16384
_MOST_REGISTERS = 255  # of a thread
# Of a thread, besides its inputs, where a block adds all spans, and where others take part. With
# fewer the compiler spills.
_WORK_REGISTERS, _SHARED_WORK_REGISTERS = 48, 56


@dataclass(frozen=True, kw_only=True)
class RowsBuild:
    """One way for `multirow` to share a matrix out.

    Attributes:
        tiles: of 8 rows, that share a read of the weights.
        side: spans of K that a block works on side by side.
        blocks: of a cluster; each takes its share of the spans.
        stages: of the ring at most.
    """

    tiles: int
    side: int
    blocks: int
    stages: int = MAX_STAGES

    def turns(self, layout: Layout) -> int:
        """Return how often a block walks its outputs."""
        return layout.splits // (self.side * self.blocks)

    def adds_all(self, layout: Layout) -> bool:
        """Tell whether a block holds all of K at a time, so that no sums wait for others."""
        return self.side == layout.splits

    def threads(self, layout: Layout) -> int:
        """Return the threads of a block: the slices' warps, one that copies and one that adds."""
        return (layout.warps * self.side + _SERVICE_WARPS) * 32

    def most_sums(self, layout: Layout, device: Device) -> int:
        """Return the tiles of a block whose sums wait for others: all of a small matrix."""
        workers = device.processors // self.blocks
        if self.blocks > 1:  # multiprocessors that no cluster fits on
            workers = max(1, workers * 7 // 8)
        return min(_MOST_SUMS, -(-layout.tiles // workers))

    def launches(self, layout: Layout, device: Device) -> int:
        """Return the launches that a matrix takes, as far as all multiprocessors can take part."""
        if self.adds_all(layout):
            return 1
        workers = device.processors // self.blocks
        return -(-layout.tiles // (workers * self.most_sums(layout, device)))

    def shared_bytes(self, layout: Layout, device: Device, stages: int) -> int:
        """Return the shared memory of a block, as linear_rows.cu carves it up."""
        rows, slices = self.tiles * ROWS, layout.warps * self.side
        ring = stages * (slices * layout.piece_bytes + 16) + 32  # and their barriers
        slots = 2 * slices * rows * _SLOT_ROW * 4
        input_sums = slices * layout.chunks * (CHUNK // layout.group) * rows * 4
        if self.adds_all(layout):
            return ring + slots + input_sums
        spans = self.turns(layout) * self.side
        sums = spans * self.most_sums(layout, device) * rows * TILE * 4
        return ring + slots + input_sums + sums

    def fitting_stages(self, layout: Layout, device: Device) -> int:
        """Return the stages of the ring that shared memory allows; 0 for none."""
        for stages in range(self.stages, 0, -1):
            if self.shared_bytes(layout, device, stages) <= device.shared_bytes:
                return stages
        return 0


def rows_builds(layout: Layout, device: Device) -> Iterator[RowsBuild]:
    """Yield every build that fits shared memory and registers, fewest rows first."""
    for tiles in range(1, MAX_TILES + 1):
        for side in (1, 2):
            for blocks in range(1, (MAX_CLUSTER if device.has_clusters else 1) + 1):
                build = RowsBuild(tiles=tiles, side=side, blocks=blocks)
                whole = layout.splits % (side * blocks) == 0
                if whole and _fits(layout, device, build):
                    yield build


@cache
def choose_rows_build(layout: Layout, device: Device, num_rows: int) -> RowsBuild:
    """Return the build that serves so many rows best, as measured on an H200.

    As few passes as can be and no more rows in one than that takes; then as few turns and blocks as
    hold all of K. Two blocks share a small matrix's K.
    """
    small = layout.splits == 2 and layout.tiles <= _SMALL_ROUNDS * device.processors
    if small and device.has_clusters and num_rows <= ROWS:
        return RowsBuild(tiles=1, side=1, blocks=2, stages=SMALL_STAGES)

    def rank(build: RowsBuild) -> tuple[int, ...]:
        slow = build.fitting_stages(layout, device) < _GOOD_STAGES
        slow |= build.launches(layout, device) > _FEW_LAUNCHES
        passes = -(-num_rows // (ROWS * build.tiles))
        return slow, passes, build.tiles, build.turns(layout), build.blocks

    return min(rows_builds(layout, device), key=rank)


def _fits(layout: Layout, device: Device, build: RowsBuild) -> bool:
    warps = layout.warps * build.side
    if warps > MAX_WARPS or not build.fitting_stages(layout, device):
        return False
    per_scheduler = -(-(warps + _SERVICE_WARPS) // _SCHEDULERS)
    registers = min(_MOST_REGISTERS, _SCHEDULER_REGISTERS // (32 * per_scheduler))
    work = _WORK_REGISTERS if build.adds_all(layout) else _SHARED_WORK_REGISTERS
    # A single tile must be served whatever it takes; a spill there is small.
    return build.tiles == 1 or layout.chunks * ROWS * build.tiles + work <= registers
