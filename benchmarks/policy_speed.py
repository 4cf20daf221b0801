"""What a decision costs: one sequence, and each sequence of a batch beyond the first.

    python benchmarks/policy_speed.py [--json FILE]

Bars: 20 µs at batch 1, 10 µs a sequence beyond. Runs alternate, and the median of their means is
shown, so what is worked out once for several rounds is shared out among them. All widths are
measured. The last line sweeps the caches before every call, as forwards do.
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
# Swept before every call where the caches are to be as a forward of a small model leaves them.
SWEEP_BYTES, COLD_CALLS = 100 << 20, 200


class Machine:
    """Steps of a batch whose forwards take 2 % more with every row."""

    def __init__(self, batch: int) -> None:
        self._policy, self._rng = MeasuredPolicy(), random.Random(batch)
        for rows in range(1, 4096):
            self._policy.cost.calibrate(rows, 100 * batch, 0.005 * (1.0 + 0.02 * rows))
        self._view = StepView(
            rounds=[
                RoundView(remaining=1000, context_len=100, proposed=15, ceiling=15, request=index)
                for index in range(batch)
            ]
        )
        self._sweep = bytearray(0)

    def sweep(self, num_bytes: int) -> None:
        """Read so many bytes before every choice from now on, as a forward reads its weights."""
        self._sweep = bytearray(num_bytes)

    def step(self) -> tuple[float, float]:
        """Return the seconds of a choice, and of taking in what came of it."""
        self._sweep.count(1)
        began = time.perf_counter()
        decisions = self._policy.choose_step(self._view)
        chose_s = time.perf_counter() - began
        round_s = 0.005 * (1.0 + 0.02 * sum([1 + decision.k for decision in decisions]))
        rounds = []
        for index, decision in enumerate(decisions):
            accepted = 0
            while accepted < decision.k and self._rng.random() < 0.8:
                accepted += 1
            rounds.append(
                RoundOutcome(
                    k=decision.k,
                    paid=decision.paid,
                    accepted=accepted,
                    emitted=accepted + 1,
                    draft_s=0.0,
                    verify_s=round_s,
                    round_s=round_s,
                    request=index,
                    context_len=100,
                )
            )
        outcome = StepOutcome(rounds=rounds, draft_s=0.0, verify_s=round_s, round_s=round_s)
        self._sweep.count(1)
        began = time.perf_counter()
        self._policy.observe_step(outcome)
        return chose_s, time.perf_counter() - began


def _cold(machine: Machine) -> list[tuple[float, float]]:
    return [machine.step() for _ in range(COLD_CALLS)]


def main() -> int:
    """Print the table and one JSON line; return 1 above the bars."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machines = {batch: Machine(batch) for batch in BATCHES}
    choose_us: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    observe_us: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for machine in machines.values():
        for _ in range(60):
            machine.step()
    for _ in range(ROUNDS):
        for batch, machine in machines.items():
            steps = [machine.step() for _ in range(CALLS)]
            for times, spent in zip((choose_us, observe_us), zip(*steps, strict=True), strict=True):
                times[batch].append(1e6 * statistics.mean(spent))
    chosen = {batch: statistics.median(values) for batch, values in choose_us.items()}
    observed = {batch: statistics.median(values) for batch, values in observe_us.items()}
    print("bars: 20 µs at batch 1, 10 µs a sequence beyond\n")
    print(f"{'batch':>5} {'choose µs':>10} {'per sequence beyond':>20} {'observe µs':>11}")
    for batch in BATCHES:
        beyond = (chosen[batch] - chosen[1]) / (batch - 1) if batch > 1 else 0.0
        print(f"{batch:>5} {chosen[batch]:>10.1f} {beyond:>20.1f} {observed[batch]:>11.1f}")
    machines[1].sweep(SWEEP_BYTES)
    cold = [1e6 * statistics.mean(spent) for spent in zip(*_cold(machines[1]), strict=True)]
    print(f"\nbatch 1, caches swept before each: choose {cold[0]:.0f} µs, observe {cold[1]:.0f} µs")
    line = json.dumps({"schema": 2, "choose_us": chosen, "observe_us": observed, "swept_us": cold})
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    slow = any((chosen[b] - chosen[1]) / (b - 1) > 10.0 for b in BATCHES if b > 1)
    return 1 if chosen[1] > 20.0 or slow else 0


if __name__ == "__main__":
    sys.exit(main())
