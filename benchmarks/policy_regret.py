"""How close the policy comes to the best fixed k, in expectation, on every recorded pairing.

    python benchmarks/policy_regret.py [--seeds 200] [--only NAMES] [--jobs 1] [--json FILE]

Each seed plays 2,000 rounds on a virtual clock; rounds 201 to 2,000 count. A choice is valued by
what it yields in expectation, so luck in the acceptances of one run is not in the figure. The
policy starts knowing nothing: no profile, no calibration.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from slipstream.policy.choose import MeasuredPolicy  # noqa: E402
from slipstream.policy.simulator import World, run  # noqa: E402
from slipstream.policy.traces import world_of  # noqa: E402

FIRST, LAST = 200, 2000


def share_of_best(world: World, edges: tuple[int, ...], seed: int, *, free: bool = False) -> float:
    """Return the expected rate of the chosen widths over that of the best fixed k."""
    policy = MeasuredPolicy(edges=edges, paid=not free)
    steps = run(world, policy, random.Random(seed), num_rounds=LAST)[FIRST:]
    tokens = sum(world.emitted(step.k, 0) for step in steps)
    seconds = sum(world.round_s(step.k, step.context_len, 0) for step in steps)
    return tokens / seconds / world.best(100)[1]


def worlds() -> dict[str, tuple[World, tuple[int, ...]]]:
    """Return the stationary worlds by name: the recorded pairings."""
    file = ROOT / "tests" / "data" / "recorded_pairings.json"
    traces = json.loads(file.read_text(encoding="utf-8"))["traces"]
    return {trace["name"]: world_of(trace) for trace in traces}


def seed_of(name: str, seed: int) -> float:
    """Return `share_of_best` of one seed of a pairing."""
    world, edges = worlds()[name]
    return share_of_best(world, edges, seed)


def main() -> int:
    """Print a table and one JSON line; return 1 if a mean is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--only", help="names of pairings, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"bar: 0.970 of the best fixed k, rounds {FIRST + 1} to {LAST}, mean of seeds\n")
    print(f"{'pairing':<22} {'best k':>6} {'best S':>7} {'mean':>7} {'worst seed':>10}")
    for name, (world, _) in worlds().items():
        if options.only and name not in options.only.split(","):
            continue
        with Pool(options.jobs) as pool:
            shares = pool.map(partial(seed_of, name), range(options.seeds))
        best_k, rate = world.best(100)
        row = {
            "pairing": name,
            "best_k": best_k,
            "best_speedup": round(rate * world.round_s(0, 100, 0), 3),
            "mean": round(sum(shares) / len(shares), 4),
            "worst": round(min(shares), 4),
        }
        rows.append(row)
        print(
            f"{name:<22} {best_k:>6} {row['best_speedup']:>7} {row['mean']:>7} {row['worst']:>10}"
        )
    line = json.dumps({"schema": 1, "seeds": options.seeds, "pairings": rows})
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0 if all(row["mean"] >= 0.97 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
