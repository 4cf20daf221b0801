"""Small-M linears on a GPU: time by rows and kernel, against the bytes that must move.

Every number is the median over replays of a CUDA graph that multiplies by one weight set after the
other, so many that none is still in L2 when its turn comes again. The graphs of a shape are
replayed in turns, round after round, so that a clock that drifts favours none. The bound is the
bytes of the packed weight at the bandwidth of a device-to-device copy in the same run. torch's int4
kernel and a bf16 `torch.mm` multiply the same shapes in the same way.

With --teams, the ways for teams of warps to share a matrix out instead, each beside `multirow` with
its inputs in registers.

    python benchmarks/cuda_linear.py [--quick] [--teams] [--shapes 4096x4096] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from shapes import packed_layout

from slipstream.kernels.cuda import compiler
from slipstream.kernels.cuda.bandwidth import copy_bandwidth
from slipstream.kernels.cuda.linear import TILE_ROWS, CudaWeight, Segment, linear
from slipstream.kernels.cuda.linear_builds import choose_rows_build
from slipstream.kernels.cuda.linear_kernels import LinearKernels
from slipstream.kernels.cuda.linear_teams import team_builds
from slipstream.models.loading.names import cache_dir

Key = TypeVar("Key")

SHAPES = (
    (15360, 3840),
    (3840, 15360),
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (262144, 3840),
)
ROTATION_BYTES = 1 << 30  # of weight sets: far more than any L2
MAX_SETS = 48
ROUNDS, REPLAYS = 5, 3  # timed: every graph three times, five times over
WARM_UP_S = 0.1  # of replays before: the clocks of an idle device take a while to rise
PREFILL_ROWS = (32, 64, 128, 256)
TEAM_ROWS = {1: (1, 8), 2: (16,), 3: (24,), 4: (32, 64, 256)}  # by tiles of a build
TEAM_STAGES = (4, 8)  # of the ring


def _timed(action: Callable[[], object]) -> float:
    """Return the seconds that the device takes for `action`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    action()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def time_all(calls: Mapping[Key, Callable[[int], object]], sets: int) -> dict[Key, float]:
    """Return the seconds of one call each, from graphs that call it once for every set."""
    graphs = {}
    for key, call in calls.items():
        call(0)
        torch.cuda.synchronize()
        graphs[key] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[key]):
            for index in range(sets):
                call(index)
    warm = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < warm:
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(ROUNDS):
        for key, graph in graphs.items():
            graph.replay()  # takes what the one before left in L2
            times[key] += [_timed(graph.replay) for _ in range(REPLAYS)]
    return {key: statistics.median(found) / sets for key, found in times.items()}


def random_weights(n: int, k: int, sets: int) -> list[CudaWeight]:
    """Return packed 4-bit matrices with biases, groups of 64, random codes, small scales."""
    layout = packed_layout(n, k)
    kernels = LinearKernels(layout, compiler.current_device(), cache_dir() / "kernels")
    weights = []
    for _ in range(sets):
        pieces = torch.randint(
            0,
            256,
            (layout.num_bytes // layout.piece_bytes, layout.piece_bytes),
            device="cuda",
            dtype=torch.uint8,
        )
        at = layout.piece_chunks * layout.code_bytes
        scales = pieces[:, at:].contiguous().view(torch.float16)
        scales.normal_(std=0.01)
        pieces[:, at:] = scales.view(torch.uint8)
        weights.append(
            CudaWeight(n=n, k=k, segments=(Segment(layout, 0, pieces.view(-1), kernels),))
        )
    return weights


def measure_shape(n: int, k: int, copy_rate: float, *, quick: bool) -> dict[str, Any]:
    """Time one shape by every kernel and number of rows."""
    probe = random_weights(n, k, 1)[0]
    sets = max(2, min(MAX_SETS, ROTATION_BYTES // probe.num_bytes))
    weights = random_weights(n, k, sets)
    most = max(PREFILL_ROWS)
    x = torch.randn(most, k, device="cuda").bfloat16()
    out = torch.empty(most, n, device="cuda")

    def call(name: str, rows: int) -> Callable[[int], object]:
        kernel, tile_m = (name[:4], int(name[4:])) if name.startswith("tile") else (name, 16)
        return lambda i: linear(x, weights[i], out, num_rows=rows, kernel=kernel, tile_m=tile_m)

    few: list[int] = [1, 8, 16] if quick else list(range(1, 17))
    cells = {"multirow": [*few, *PREFILL_ROWS], "gemv": few[:2] if quick else few}
    for tile_m in TILE_ROWS:
        cells[f"tile{tile_m}"] = [1, 8, 16, *(rows for rows in PREFILL_ROWS if rows >= tile_m)]
    found = time_all(
        {(name, rows): call(name, rows) for name, some in cells.items() for rows in some}, sets
    )
    one = found["multirow", 1]
    return {
        "n": n,
        "k": k,
        "bytes": probe.num_bytes,
        "sets": sets,
        "us_at_1_row": one * 1e6,
        "tb_per_s": probe.num_bytes / one * 1e-12,
        "share_of_copy": probe.num_bytes / one / copy_rate,
        "us": {
            name: {rows: found[name, rows] * 1e6 for rows in some} for name, some in cells.items()
        },
        "times_1_row": {rows: found["multirow", rows] / one for rows in cells["multirow"]},
        "torch_us": {} if quick else torch_times(n, k, x),
    }


def torch_times(n: int, k: int, x: torch.Tensor) -> dict[str, dict[int, float]]:
    """Time torch's int4 kernel and a bf16 product at 1, 8 and 16 rows, in microseconds."""
    rows = (1, 8, 16)
    sets = max(2, min(24, ROTATION_BYTES // (n * k // 2)))
    packed = []
    for _ in range(sets):
        codes = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
        packed.append(torch.ops.aten._convert_weight_to_int4pack(codes, 8))
    scales = torch.randn(k // 64, n, 2, device="cuda").bfloat16() * 0.01

    def int4(r: int) -> Callable[[int], object]:
        return lambda i: torch.ops.aten._weight_int4pack_mm(x[:r], packed[i], 64, scales)

    times = {"int4": time_all({r: int4(r) for r in rows}, sets)}
    packed.clear()
    sets = max(2, min(24, ROTATION_BYTES // (n * k * 2)))
    dense = [torch.randn(k, n, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]

    def bf16(r: int) -> Callable[[int], object]:
        return lambda i: torch.mm(x[:r], dense[i])

    times["bf16"] = time_all({r: bf16(r) for r in rows}, sets)
    return {name: {r: t * 1e6 for r, t in found.items()} for name, found in times.items()}


def measure_teams(n: int, k: int) -> dict[str, Any]:
    """Time one shape by every build of teams, in microseconds by build and rows."""
    probe = random_weights(n, k, 1)[0]
    weights = random_weights(n, k, max(2, min(MAX_SETS, ROTATION_BYTES // probe.num_bytes)))
    (segment,) = weights[0].segments
    kernels, device = segment.kernels, compiler.current_device()
    most = max(max(rows) for rows in TEAM_ROWS.values())
    x = torch.randn(most, k, device="cuda").bfloat16()
    out = torch.empty(most, n, device="cuda")

    def packed(i: int) -> torch.Tensor:
        return weights[i].segments[0].packed

    calls: dict[tuple[str, int], Callable[[int], object]] = {}
    for rows in (1, 8, 16, 24, 32):
        build = choose_rows_build(segment.layout, device, rows)
        calls["in registers", rows] = lambda i, rows=rows, build=build: kernels.multirow(
            packed(i), x, out, None, rows, one_row=False, build=build
        )
    for team in team_builds(segment.layout, device):
        for stages in TEAM_STAGES:
            team = dataclasses.replace(team, stages=stages)
            if not team.fitting_stages(segment.layout, device):
                continue
            name = f"{team.blocks} blocks, {team.teams} teams, {stages} stages"
            for rows in TEAM_ROWS[team.tiles]:
                calls[name, rows] = lambda i, rows=rows, team=team: kernels.teams(
                    packed(i), x, out, None, rows, team
                )
    us: dict[str, dict[int, float]] = {}
    for (name, rows), seconds in time_all(calls, len(weights)).items():
        us.setdefault(name, {})[rows] = seconds * 1e6
    for name, by_rows in us.items():
        print(f"{n:>6} x {k:<6} {name:30}", "  ".join(f"{r}: {t:.1f}" for r, t in by_rows.items()))
    return {"n": n, "k": k, "us": us}


def print_shape(result: dict[str, Any]) -> None:
    """Print one shape's lines."""
    us, ratio = result["us"], result["times_1_row"]
    print(
        f"{result['n']:>6} x {result['k']:<6} {result['us_at_1_row']:7.2f} us  "
        f"{result['tb_per_s']:.2f} TB/s  {result['share_of_copy']:.0%} of copy   "
        f"T(8)/T(1) {ratio[8]:.2f}  T(16)/T(1) {ratio[16]:.2f}"
    )
    for name, by_rows in us.items():
        print(f"    {name:9}", "  ".join(f"{r}: {t:.1f}" for r, t in by_rows.items()))
    for name, by_rows in result["torch_us"].items():
        print(f"    torch {name:9}", "  ".join(f"{r}: {t:.1f}" for r, t in by_rows.items()))
    sys.stdout.flush()


def sources_digest() -> str:
    """Return a hash of the kernels' sources."""
    digest = hashlib.sha256()
    for path in [*sorted(compiler.SOURCES.glob("linear*")), compiler.SOURCES / "async.cuh"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Measure, print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, no torch kernels")
    parser.add_argument("--teams", action="store_true", help="builds of teams of warps")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--json", type=Path, help="also write the line here")
    options = parser.parse_args()
    copy_rate = copy_bandwidth()
    print(f"copy of 8 GB: {copy_rate * 1e-12:.2f} TB/s read and written")
    results = []
    for shape in options.shapes.split(","):
        n, k = map(int, shape.split("x"))
        if options.teams:
            results.append(measure_teams(n, k))
        else:
            results.append(measure_shape(n, k, copy_rate, quick=options.quick))
            print_shape(results[-1])
        torch.cuda.empty_cache()
    line = json.dumps(
        {
            "schema": "slipstream-cuda-linear-1",
            "provenance": {
                "device": torch.cuda.get_device_name(),
                "driver": torch.cuda.driver_version()
                if hasattr(torch.cuda, "driver_version")
                else None,
                "torch": torch.__version__,
                "nvrtc": compiler.nvrtc_version(),
                "python": platform.python_version(),
                "sources_sha256": sources_digest(),
                "weights": "4 bits, groups of 64 with bias, random",
            },
            "copy_tb_per_s": copy_rate * 1e-12,
            "shapes": results,
        }
    )
    if options.json:
        options.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
