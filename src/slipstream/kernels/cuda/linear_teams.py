"""How `multirow` shares a matrix out on sm_90, where teams of four warps multiply with wgmma.

A block makes 64 outputs at a time, from the spans of K whose inputs it keeps in shared memory; the
blocks of a cluster have the others. What is left of shared memory is the ring of weights. Every
build adds the same sums in the same order as those of linear_builds.py: the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from slipstream.kernels.cuda.compiler import Device
from slipstream.kernels.cuda.layout import CHUNK, MAX_CLUSTER, TILE, Layout

ROWS = 8  # of a tile of inputs
MAX_TILES = 4  # that share a read; one wgmma multiplies them
TEAM_TILES = 4  # tiles of outputs that a team makes at a time
_TEAM_THREADS = 128
_COPY_THREADS = 32
TEAMS = (1, 2, 3, 4)
MAX_STAGES = 8
_GOOD_STAGES = 4  # measured: half the ring of eight costs 3 to 20 %
_BEST_TEAMS = 3  # measured: four are quicker by a tenth at 16 rows, slower by 4 % at 32
_ITEM_BYTES = 32 << 10  # of spans' sums in a batch of outputs, where more would not be one batch
_ARCH = "sm_90"  # wgmma is this architecture's alone


@dataclass(frozen=True, kw_only=True)
class TeamBuild:
    """One way for teams to share a matrix out.

    Attributes:
        tiles: of 8 rows, that share a read of the weights.
        blocks: of a cluster; each takes its share of the spans.
        teams: of a block.
        stages: of the ring at most.
    """

    tiles: int
    blocks: int
    teams: int
    stages: int = MAX_STAGES

    def own_spans(self, layout: Layout) -> int:
        """Return the spans whose inputs a block keeps."""
        return layout.splits // self.blocks

    @property
    def threads(self) -> int:
        """Threads of a block: the teams' and a warp that copies."""
        return self.teams * _TEAM_THREADS + _COPY_THREADS

    def batch(self, layout: Layout, device: Device) -> int:
        """Return the groups of 64 outputs whose sums a block keeps at a time."""
        workers = device.processors // self.blocks
        groups = -(-layout.tiles // TEAM_TILES)
        item = self.own_spans(layout) * self.tiles * _TEAM_THREADS * 16
        return max(1, min(-(-groups // workers), _ITEM_BYTES // item))

    def shared_bytes(self, layout: Layout, device: Device, stages: int) -> int:
        """Return the shared memory of a block, as linear_teams.cu carves it up."""
        spans, rows = self.own_spans(layout), self.tiles * ROWS
        chunks = spans * layout.warps * layout.chunks
        inputs = chunks * CHUNK * rows * 2
        sums = chunks * (CHUNK // layout.group) * rows * 4
        items = self.batch(layout, device) * spans * self.tiles * _TEAM_THREADS * 16
        ring = stages * (TEAM_TILES * layout.piece_bytes + 16)  # and their barriers
        return inputs + sums + items + ring + self.teams * 4 * 8

    def fitting_stages(self, layout: Layout, device: Device) -> int:
        """Return the stages of the ring that shared memory allows; 0 for none that serve.

        The ring must hold the pieces of as many slices as there are teams (linear_teams.cu).
        """
        least = self.teams * (layout.chunks // layout.piece_chunks)
        for stages in range(max(self.stages, least), least - 1, -1):
            if self.shared_bytes(layout, device, stages) <= device.shared_bytes:
                return stages
        return 0


def has_teams(device: Device) -> bool:
    """Tell whether a device has wgmma."""
    return device.arch == _ARCH


def team_builds(layout: Layout, device: Device) -> Iterator[TeamBuild]:
    """Yield every build that fits shared memory, fewest rows first."""
    for tiles in range(1, MAX_TILES + 1):
        for blocks in range(1, MAX_CLUSTER + 1):
            for teams in TEAMS:
                build = TeamBuild(tiles=tiles, blocks=blocks, teams=teams)
                if layout.splits % blocks == 0 and build.fitting_stages(layout, device):
                    yield build


@cache
def choose_team_build(layout: Layout, device: Device, num_rows: int) -> TeamBuild | None:
    """Return the build that serves so many rows best, None where none does.

    As few passes as can be and no more rows in one than that takes; then the least that any block
    has to multiply, and the smallest cluster that reaches it.
    """
    if not has_teams(device):
        return None

    def rank(build: TeamBuild) -> tuple[int, ...]:
        slow = build.fitting_stages(layout, device) < _GOOD_STAGES
        passes = -(-num_rows // (ROWS * build.tiles))
        groups = -(-layout.tiles // TEAM_TILES)
        most = -(-groups // (device.processors // build.blocks)) * build.own_spans(layout)
        return slow, passes, build.tiles, most, build.blocks, abs(build.teams - _BEST_TEAMS)

    return min(team_builds(layout, device), key=rank, default=None)


def team_grid(layout: Layout, workers: int) -> int:
    """Return the workers that have outputs to make."""
    return min(workers, -(-layout.n // (TILE * TEAM_TILES)))
