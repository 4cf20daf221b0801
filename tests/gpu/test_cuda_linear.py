"""CUDA linears: the same bytes from every kernel at every number of rows, near float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the cuda back end needs torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from slipstream.errors import LoadError  # noqa: E402
from slipstream.kernels.cuda.compiler import current_device  # noqa: E402
from slipstream.kernels.cuda.linear import TILE_ROWS, CudaWeight, embed, linear, pack  # noqa: E402
from slipstream.kernels.cuda.linear_builds import rows_builds  # noqa: E402
from slipstream.kernels.cuda.linear_teams import (  # noqa: E402
    choose_team_build,
    has_teams,
    team_builds,
)
from slipstream.models.loading.names import cache_dir  # noqa: E402
from slipstream.models.weights import Tensor  # noqa: E402
from tests.unit.test_cuda_packing import (  # noqa: E402
    draw_codes,
    draw_dense,
    draw_two_levels,
    in_bfloat16,
)

pytestmark = pytest.mark.gpu

# Scales that are not one float16 a group: of two levels, or bfloat16 as MLX has them.
K_QUANTS = {"Q4_K": (4, 0, True, 32), "Q5_K": (5, 0, True, 32), "Q6_K": (6, 32, False, 16)}
MLX = {"MLX 4 bits": (4, 0, True, 64), "MLX 8 bits": (8, 0, True, 128)}
# bits, zero, has bias, group; or a name or a dense precision
KINDS: list[tuple[int, int, bool, int] | str] = [
    (4, 0, True, 64),
    (4, 0, True, 32),
    (4, 8, False, 32),
    (4, 0, True, 16),
    (4, 0, True, 128),
    (8, 128, False, 32),
    (8, 0, True, 64),
    (5, 16, False, 32),
    (5, 0, True, 32),
    *K_QUANTS,
    *MLX,
    "bf16",
    "f16",
    "f32",
]
SHAPES = [(97, 96), (512, 576), (1000, 3840), (256, 4096), (144, 5120), (80, 15360)]
ROWS = 300
KERNELS = [("gemv", 16), ("multirow", 16), *(("tile", rows) for rows in TILE_ROWS)]


def packed(parts: Sequence[Tensor]) -> CudaWeight:
    """Pack with the kernels that earlier runs compiled."""
    return pack(parts, cubins=cache_dir() / "cubins")


def draw(kind: tuple[int, int, bool, int] | str, n: int, k: int) -> Tensor:
    """Return a random matrix; where k is no multiple of the group, of half the group and so on."""
    if kind in K_QUANTS:
        if k % 256:
            pytest.skip("blocks of 256 columns")
        return draw_two_levels(n, k, *K_QUANTS[kind])
    if isinstance(kind, str) and kind not in MLX:
        return draw_dense(n, k, kind)
    bits, zero, has_bias, group = MLX[kind] if isinstance(kind, str) else kind
    while k % group:
        group //= 2
    part = draw_codes(n, k, bits, zero, has_bias, group)
    return in_bfloat16(part) if kind in MLX else part


def draw_inputs(rows: int, k: int) -> torch.Tensor:
    """Return bfloat16 inputs with a few large columns, as activations have them."""
    generator = torch.Generator("cuda").manual_seed(k)
    x = torch.randn(rows, k, device="cuda", generator=generator)
    x[:, :: max(k // 5, 1)] *= 30
    return x.to(torch.bfloat16)


def run(
    x: torch.Tensor,
    weight: CudaWeight,
    num_rows: int,
    *,
    kernel: str = "auto",
    tile_m: int = 16,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the first rows of the output; what lies behind them must stay untouched."""
    out = torch.full((len(x), weight.n), float("nan"), device="cuda")
    linear(x, weight, out, residual, num_rows=num_rows, kernel=kernel, tile_m=tile_m)
    assert torch.isnan(out[num_rows:]).all()
    return out[:num_rows]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two float32 tensors agree bit for bit."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_close_to_float64(n: int, k: int, kind: tuple[int, int, bool, int] | str) -> None:
    part = draw(kind, n, k)
    x = draw_inputs(20, k)
    residual = torch.randn(20, n, device="cuda")
    exact = torch.from_numpy(part.dequantize()).cuda().double()
    expected = x.double() @ exact.T + residual.double()
    out = run(x, packed([part]), 20, residual=residual).double()
    # Float32 sums of exact products: far below the rounding of the inputs to bfloat16, 2e-3.
    assert torch.linalg.norm(out - expected) <= 1e-5 * torch.linalg.norm(expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_kernels_and_row_counts_give_the_same_bytes(
    n: int, k: int, kind: tuple[int, int, bool, int] | str
) -> None:
    weight = packed([draw(kind, n, k)])
    x = draw_inputs(ROWS, k)
    one_by_one = torch.cat([run(x[row : row + 1], weight, 1) for row in range(ROWS)])
    x[ROWS - 1] = float("nan")  # a row that is never asked for must not be seen
    for kernel, tile_m in KERNELS:
        for rows in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 33, 64, 65, 100, 128, 129, 256, 299):
            out = run(x, weight, rows, kernel=kernel, tile_m=tile_m)
            assert same_bytes(out, one_by_one[:rows]), f"{kernel} {tile_m}, {rows} rows"


@pytest.mark.parametrize("kind", [(4, 0, True, 64), (8, 128, False, 32), "bf16"], ids=str)
@pytest.mark.parametrize("k", [576, 3840, 4096, 5120, 15360])
def test_every_way_to_share_a_matrix_out_gives_the_same_bytes(
    k: int, kind: tuple[int, int, bool, int] | str
) -> None:
    n, rows = 16 * 150 + 5, 65  # more tiles than multiprocessors
    weight = packed([draw(kind, n, k)])
    x, residual = draw_inputs(rows, k), torch.randn(rows, n, device="cuda")
    expected = run(x, weight, rows, kernel="gemv", residual=residual)
    (segment,) = weight.segments
    for build in rows_builds(segment.layout, current_device()):
        for count in (1, build.tiles * 8 - 3, build.tiles * 8, 65):
            out = torch.full((rows, n), float("nan"), device="cuda")
            segment.kernels.multirow(
                segment.packed, x, out, residual, count, one_row=False, build=build
            )
            assert same_bytes(out[:count], expected[:count]), f"{build}, {count} rows"
            assert torch.isnan(out[count:]).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("k", [512, 3840, 4096, 15360])
def test_teams_give_the_same_bytes(k: int, kind: tuple[int, int, bool, int] | str) -> None:
    if not has_teams(current_device()):
        pytest.skip("no wgmma")
    n, rows = 64 * 140 + 37, 40  # more groups than multiprocessors
    weight = packed([draw(kind, n, k)])
    x, residual = draw_inputs(rows, k), torch.randn(rows, n, device="cuda")
    expected = run(x, weight, rows, kernel="gemv", residual=residual)
    (segment,) = weight.segments
    for count in (1, 8, 9, 16, 23, 24, 32, 40):
        build = choose_team_build(segment.layout, current_device(), count)
        assert build is not None
        for _ in range(3):
            out = torch.full((rows, n), float("nan"), device="cuda")
            segment.kernels.teams(segment.packed, x, out, residual, count, build)
            assert same_bytes(out[:count], expected[:count]), f"{build}, {count} rows"
            assert torch.isnan(out[count:]).all()


@pytest.mark.parametrize("k", [4096, 15360])
def test_however_many_blocks_share_the_spans(k: int) -> None:
    if not has_teams(current_device()):
        pytest.skip("no wgmma")
    n, rows = 64 * 210 + 37, 16  # so many groups that each place for sums is used anew
    weight = packed([draw((4, 0, True, 64), n, k)])
    x, residual = draw_inputs(rows, k), torch.randn(rows, n, device="cuda")
    expected = run(x, weight, rows, kernel="gemv", residual=residual)
    (segment,) = weight.segments
    builds = [
        build
        for build in team_builds(segment.layout, current_device())
        if build.tiles == 2 and build.teams >= 3
    ]
    assert len({build.blocks for build in builds}) > 1
    for build in builds:
        for _ in range(20):
            out = torch.full((rows, n), float("nan"), device="cuda")
            segment.kernels.teams(segment.packed, x, out, residual, rows, build)
            assert same_bytes(out, expected), str(build)


@pytest.mark.parametrize(("n", "k"), [(200, 576), (144, 5120), (80, 15360)])
def test_a_bias_is_added_to_every_row(n: int, k: int) -> None:
    weight = packed([draw((4, 0, True, 32), n, k)])
    x, bias = draw_inputs(70, k), torch.randn(1, n, device="cuda")
    beside = bias.expand(70, -1).contiguous()
    for kernel, tile_m in KERNELS:
        for rows in (1, 9, 20, 70):
            expected = run(x, weight, rows, kernel=kernel, tile_m=tile_m, residual=beside)
            out = run(x, weight, rows, kernel=kernel, tile_m=tile_m, residual=bias)
            assert same_bytes(out, expected)


def test_every_row_count_up_to_300() -> None:
    weight = packed([draw((4, 0, True, 64), 272, 3840)])
    x = draw_inputs(ROWS, 3840)
    one_by_one = run(x, weight, ROWS, kernel="gemv")
    for rows in range(1, ROWS + 1):
        assert same_bytes(run(x, weight, rows), one_by_one[:rows]), f"{rows} rows"


@pytest.mark.parametrize(("kernel", "tile_m"), KERNELS)
def test_place_among_others_changes_nothing(kernel: str, tile_m: int) -> None:
    weight = packed([draw((4, 0, True, 64), 272, 14336)])
    x = draw_inputs(48, 14336)
    out = run(x, weight, 48, kernel=kernel, tile_m=tile_m)
    order = torch.randperm(48, device="cuda")
    assert same_bytes(run(x[order], weight, 48, kernel=kernel, tile_m=tile_m), out[order])
    assert same_bytes(run(x, weight, 48, kernel=kernel, tile_m=tile_m), out)


def test_fused_parts_of_several_kinds_equal_the_parts_alone() -> None:
    kinds: Sequence[tuple[int, int, bool, int] | str] = [
        (4, 0, True, 32),
        (8, 128, False, 32),
        "f16",
    ]
    parts = [draw(kind, n, 576) for kind, n in zip(kinds, (64, 40, 24), strict=True)]
    parts.insert(1, draw((4, 0, True, 32), 72, 576))
    x = draw_inputs(20, 576)
    residual = torch.randn(20, 200, device="cuda")
    fused = run(x, packed(parts), 20, residual=residual)
    first = 0
    for part in parts:
        last = first + part.shape[0]
        beside = residual[:, first:last].contiguous()
        for kernel, tile_m in KERNELS:
            alone = run(x, packed([part]), 20, residual=beside, kernel=kernel, tile_m=tile_m)
            assert same_bytes(alone, fused[:, first:last])
        first = last


def test_residual_may_be_the_output() -> None:
    weight = packed([draw((4, 0, True, 64), 256, 15360)])
    x = draw_inputs(20, 15360)
    residual = torch.randn(20, 256, device="cuda")
    for kernel, tile_m in KERNELS:
        expected = run(x, weight, 20, residual=residual, kernel=kernel, tile_m=tile_m)
        out = residual.clone()
        linear(x, weight, out, out, num_rows=20, kernel=kernel, tile_m=tile_m)
        assert same_bytes(out, expected)


def test_graph_of_dependent_linears_equals_eager_launches() -> None:
    wide, narrow = packed([draw((4, 0, True, 64), 4096, 1024)]), packed([draw("bf16", 1024, 4096)])
    x = draw_inputs(5, 1024)
    middle, out = torch.empty(5, 4096, device="cuda"), torch.empty(5, 1024, device="cuda")

    def chain() -> None:
        linear(x, wide, middle, num_rows=5)
        for _ in range(4):
            linear((middle * 1e-3).bfloat16(), narrow, out, num_rows=5)
            linear((out * 1e-3).bfloat16(), wide, middle, middle, num_rows=5)

    chain()
    expected = middle.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    middle.zero_()
    for _ in range(20):
        graph.replay()
        assert same_bytes(middle, expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(97, 96), (512, 576), (80, 15360)])
def test_embedding_rows_are_exact(n: int, k: int, kind: tuple[int, int, bool, int] | str) -> None:
    part = draw(kind, n, k)
    ids = torch.randint(0, n, (40,), dtype=torch.int32, device="cuda")
    out = torch.full((40, k), float("nan"), device="cuda")
    embed(ids, packed([part]), out, num_rows=37)
    assert np.array_equal(out[:37].cpu().numpy(), part.dequantize()[ids[:37].cpu().numpy()])
    assert torch.isnan(out[37:]).all()


def test_unequal_widths_are_refused() -> None:
    with pytest.raises(LoadError, match="one width"):
        packed([draw("bf16", 16, 64), draw("bf16", 16, 128)])
