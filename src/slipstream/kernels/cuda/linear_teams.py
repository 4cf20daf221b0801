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
_BEST_TEAMS = 4  # measured: three are slower by 2 to 12 %
# With more tiles times groups of a chunk the compiler finds no registers for so many.
_BEST_TEAMS_TILES, _NEXT_TEAMS = 8, 3
_FEWEST_SLOTS, _MOST_SLOTS = 2, 3  # for sums on their way from block to block
_TEAM_WARPS = 4
_ARCH = "sm_90"  # wgmma is this architecture's alone
# Measured with 4 bits in groups of 64. Inputs in registers are quicker for up to 8 rows, 4 where
# many blocks share K, and for up to 16 where a multiprocessor has many groups of outputs to make.
_REGISTER_ROWS, _SHARED_REGISTER_ROWS, _LONG_REGISTER_ROWS = 8, 4, 16
_LONG_GROUPS = 3
_SHARED_SPLITS = 8


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

    def slots(self, layout: Layout, device: Device) -> int:
        """Return the groups of 64 outputs whose sums may be on their way from block to block."""
        if self.blocks == 1:
            return 0
        groups = -(-layout.tiles // TEAM_TILES)
        own_groups = -(-groups // (device.processors // self.blocks))
        return max(_FEWEST_SLOTS, min(own_groups, _MOST_SLOTS))

    def shared_bytes(self, layout: Layout, device: Device, stages: int) -> int:
        """Return the shared memory of a block, as linear_teams.cu carves it up."""
        spans, rows = self.own_spans(layout), self.tiles * ROWS
        chunks = spans * layout.warps * layout.chunks
        inputs = chunks * CHUNK * rows * 2
        sums = chunks * (CHUNK // layout.group) * rows * 4
        slots = self.slots(layout, device)
        parts = slots * -(-self.tiles * _TEAM_WARPS // self.blocks)
        kept = 2 if self.blocks == 1 and spans > 1 else 1
        items = (kept * self.tiles * _TEAM_THREADS + parts * layout.splits * 32) * 16
        ring = stages * TEAM_TILES * layout.piece_bytes
        barriers = 2 * stages + self.teams * _TEAM_WARPS + spans * layout.warps + parts + slots
        return inputs + sums + items + ring + barriers * 8

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


def teams_are_quicker(layout: Layout, device: Device, num_rows: int) -> bool:
    """Tell whether teams serve so many rows better than warps with inputs in registers."""
    if not has_teams(device):
        return False
    measured = layout.kind == 4 and layout.group == CHUNK
    groups = -(-layout.tiles // TEAM_TILES)
    if not measured or groups > _LONG_GROUPS * device.processors:
        return num_rows > _LONG_REGISTER_ROWS
    shared = layout.splits >= _SHARED_SPLITS
    return num_rows > (_SHARED_REGISTER_ROWS if shared else _REGISTER_ROWS)


def team_builds(layout: Layout, device: Device) -> Iterator[TeamBuild]:
    """Yield every build that fits shared memory, fewest rows first."""
    for tiles in range(1, MAX_TILES + 1):
        for blocks in range(1, MAX_CLUSTER + 1):
            for teams in TEAMS:
                build = TeamBuild(tiles=tiles, blocks=blocks, teams=teams)
                whole = layout.splits % blocks == 0
                # Each group takes all teams (linear_teams.cu).
                whole &= blocks == 1 or build.own_spans(layout) * layout.warps >= teams
                if whole and build.fitting_stages(layout, device):
                    yield build


@cache
def choose_team_build(layout: Layout, device: Device, num_rows: int) -> TeamBuild | None:
    """Return the build that serves so many rows best, None where none does.

    As few passes as can be and no more rows in one than that takes; then the least that any block
    has to multiply, and the largest cluster that reaches it: its blocks have the fewest inputs.
    """
    if not has_teams(device):
        return None

    def rank(build: TeamBuild) -> tuple[int, ...]:
        slow = build.fitting_stages(layout, device) < _GOOD_STAGES
        passes = -(-num_rows // (ROWS * build.tiles))
        groups = -(-layout.tiles // TEAM_TILES)
        most = -(-groups // (device.processors // build.blocks)) * build.own_spans(layout)
        many = build.tiles * CHUNK // layout.group > _BEST_TEAMS_TILES
        off = abs(build.teams - (_NEXT_TEAMS if many else _BEST_TEAMS))
        return slow, passes, build.tiles, most, -build.blocks, off

    return min(team_builds(layout, device), key=rank, default=None)


def team_grid(layout: Layout, workers: int) -> int:
    """Return the workers that have outputs to make."""
    return min(workers, -(-layout.n // (TILE * TEAM_TILES)))
