"""What a decision costs: one sequence, and each sequence of a batch beyond the first.

    python benchmarks/policy_speed.py [--json FILE]

Bars: 20 µs at batch 1, 10 µs a sequence beyond. The median of runs that alternate; all widths are
measured and every sequence has a history, so nothing is skipped.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from slipstream.policy.base import RoundOutcome, RoundView, StepOutcome, StepView
from slipstream.policy.choose import MeasuredPolicy

BATCHES = (1, 2, 4, 8, 16)
ROUNDS, CALLS = 15, 200


def prepared(batch: int) -> tuple[MeasuredPolicy, StepView, StepOutcome]:
    """Return a policy with a history, a step to choose for, and an outcome to observe."""
    policy, rng = MeasuredPolicy(), random.Random(batch)
    for rows in range(1, 4096):
        policy.cost.calibrate(rows, 100 * batch, 0.005 * (1.0 + 0.02 * rows))
    view = StepView(
        rounds=[
            RoundView(remaining=1000, context_len=100, proposed=15, ceiling=15, request=index)
            for index in range(batch)
        ]
    )
    outcome = None
    for _ in range(60):
        widths = [decision.k for decision in policy.choose_step(view)]
        hits = [sum(rng.random() < 0.8 for _ in range(k)) for k in widths]
        round_s = 0.005 * (1.0 + 0.02 * (batch + sum(widths)))
        outcome = StepOutcome(
            rounds=[
                RoundOutcome(
                    k=k,
                    accepted=accepted,
                    emitted=accepted + 1,
                    draft_s=0.0,
                    verify_s=round_s,
                    round_s=round_s,
                    request=index,
                    context_len=100,
                )
                for index, (k, accepted) in enumerate(zip(widths, hits, strict=True))
            ],
            draft_s=0.0,
            verify_s=round_s,
            round_s=round_s,
        )
        policy.observe_step(outcome)
    assert outcome is not None
    return policy, view, outcome


def main() -> int:
    """Print the table and one JSON line; return 1 above the bars."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = {batch: prepared(batch) for batch in BATCHES}
    choose_us: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    observe_us: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for _ in range(ROUNDS):
        for batch, (policy, view, outcome) in cases.items():
            chose = observed_s = 0.0
            for _ in range(CALLS):
                began = time.perf_counter()
                policy.choose_step(view)
                between = time.perf_counter()
                policy.observe_step(outcome)
                chose += between - began
                observed_s += time.perf_counter() - between
            choose_us[batch].append(1e6 * chose / CALLS)
            observe_us[batch].append(1e6 * observed_s / CALLS)
    chosen = {batch: statistics.median(values) for batch, values in choose_us.items()}
    observed = {batch: statistics.median(values) for batch, values in observe_us.items()}
    print("bars: 20 µs at batch 1, 10 µs a sequence beyond\n")
    print(f"{'batch':>5} {'choose µs':>10} {'per sequence beyond':>20} {'observe µs':>11}")
    for batch in BATCHES:
        beyond = (chosen[batch] - chosen[1]) / (batch - 1) if batch > 1 else 0.0
        print(f"{batch:>5} {chosen[batch]:>10.1f} {beyond:>20.1f} {observed[batch]:>11.1f}")
    line = json.dumps({"schema": 1, "choose_us": chosen, "observe_us": observed})
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    slow = any((chosen[b] - chosen[1]) / (b - 1) > 10.0 for b in BATCHES if b > 1)
    return 1 if chosen[1] > 20.0 or slow else 0


if __name__ == "__main__":
    sys.exit(main())
