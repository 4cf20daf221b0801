"""How `multirow` shares matrices out: every build fits its device, and each row count has one."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="packing is done by torch")

from slipstream.kernels.cuda.compiler import Device
from slipstream.kernels.cuda.layout import MAX_CLUSTER, MAX_WARPS, Layout, cut_columns
from slipstream.kernels.cuda.linear_builds import ROWS, choose_rows_build, rows_builds
from slipstream.kernels.cuda.linear_teams import choose_team_build, teams_are_quicker

H200 = Device(arch="sm_90", processors=132, shared_bytes=232448)
DEVICES = {
    "sm_80": Device(arch="sm_80", processors=108, shared_bytes=166912),
    "sm_89": Device(arch="sm_89", processors=128, shared_bytes=101376),
    "sm_90": H200,
    "sm_121": Device(arch="sm_121", processors=48, shared_bytes=101376),
}
SHAPES = [(49152, 576), (576, 1536), (15360, 3840), (3840, 15360), (4096, 4096), (1000, 28672)]
KINDS = [(4, 64, True), (4, 32, False), (8, 32, True), (16, 64, False), (32, 64, False)]


def layout_of(n: int, k: int, kind: int = 4, group: int = 64, has_bias: bool = True) -> Layout:
    splits, warps, chunks = cut_columns(k)
    return Layout(
        n=n,
        k=k,
        kind=kind,
        group=group,
        zero=0,
        has_bias=has_bias,
        splits=splits,
        warps=warps,
        chunks=chunks,
    )


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(("kind", "group", "has_bias"), KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_row_count_has_a_build_that_fits(
    n: int, k: int, kind: int, group: int, has_bias: bool, device: Device
) -> None:
    layout = layout_of(n, k, kind, group, has_bias)
    builds = list(rows_builds(layout, device))
    for rows in (1, 7, 8, 9, 16, 17, 24, 25, 32, 33, 64):
        build = choose_rows_build(layout, device, rows)
        stages = build.fitting_stages(layout, device)
        assert stages >= 1
        assert build.shared_bytes(layout, device, stages) <= device.shared_bytes
        assert build.side * build.blocks * build.turns(layout) == layout.splits
        assert build.blocks == 1 or device.has_clusters
        assert build.blocks <= MAX_CLUSTER
        assert build.threads(layout) <= 32 * (MAX_WARPS + 2)
        assert any(
            (other.tiles, other.side, other.blocks) == (build.tiles, build.side, build.blocks)
            for other in builds
        )


@pytest.mark.parametrize("rows", range(1, 33))
def test_up_to_32_rows_share_one_read_where_inputs_fit_the_registers(rows: int) -> None:
    for n, k in ((15360, 3840), (3840, 15360)):
        build = choose_rows_build(layout_of(n, k), H200, rows)
        assert build.tiles == -(-rows // ROWS)


def test_a_vocabulary_is_not_cut_into_many_launches() -> None:
    layout = layout_of(262144, 3840)
    for rows in (1, 16, 32):
        assert choose_rows_build(layout, H200, rows).launches(layout, H200) <= 2


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(("kind", "group", "has_bias"), KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_teams_serve_every_row_count_where_there_are_any(
    n: int, k: int, kind: int, group: int, has_bias: bool, device: Device
) -> None:
    layout = layout_of(n, k, kind, group, has_bias)
    for rows in (1, 8, 9, 16, 17, 24, 25, 32, 33, 300):
        build = choose_team_build(layout, device, rows)
        assert (build is not None) == (device is H200)
        if build is None:
            continue
        stages = build.fitting_stages(layout, device)
        assert build.shared_bytes(layout, device, stages) <= device.shared_bytes
        assert stages >= build.teams * layout.chunks // layout.piece_chunks
        assert layout.splits % build.blocks == 0
        assert build.blocks <= MAX_CLUSTER
        assert build.threads <= 1024
        # What keeps teams from getting a lap ahead, as linear_teams.cu asserts.
        clustered = build.blocks > 1
        assert not clustered or build.own_spans(layout) * layout.warps >= build.teams
        assert not clustered or build.slots(layout, device) >= 2


@pytest.mark.parametrize("rows", range(1, 33))
def test_teams_read_weights_once_for_up_to_32_rows(rows: int) -> None:
    for n, k in ((15360, 3840), (3840, 15360), (4096, 4096), (49152, 576)):
        build = choose_team_build(layout_of(n, k), H200, rows)
        assert build is not None
        assert build.tiles == -(-rows // ROWS)


@pytest.mark.parametrize(("kind", "group", "has_bias"), KINDS)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (262144, 3840)])
def test_teams_take_over_at_one_row_count(
    n: int, k: int, kind: int, group: int, has_bias: bool
) -> None:
    layout = layout_of(n, k, kind, group, has_bias)
    by_rows = [teams_are_quicker(layout, H200, rows) for rows in range(1, 65)]
    assert by_rows == sorted(by_rows)
    assert not by_rows[0]
    assert all(by_rows[16:])
    assert not any(teams_are_quicker(layout, DEVICES["sm_121"], rows) for rows in range(1, 65))
