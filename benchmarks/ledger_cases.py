"""Plays adversaries against the loss budget and checks its bound over every window.

    python benchmarks/ledger_cases.py [--cases 10000] [--seed 0]

An adversary sees k before it picks how much is accepted and what the round takes. It also moves the
classic step's cost (heat, context), changes the batch, and throws in hiccups. After a case the
bound of docs/policy.md is checked over every window of its rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from slipstream.policy.base import RoundOutcome, RoundView, StepOutcome, StepView
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.ledger import CAPACITY_STEPS, RHO

STYLES = ("greedy", "trap", "random", "hiccup", "drift", "batch", "walk")


@dataclass(frozen=True)
class Played:
    """One step: seconds taken, classic seconds of its tokens, and what the theorem names."""

    taken_s: float
    classic_s: float
    delta: float
    capacity_s: float
    overshoot_s: float


def play(style: str, rng: random.Random, num_rounds: int) -> list[Played]:
    """Return the steps of one case."""
    policy = MeasuredPolicy(edges=range(1, 129))
    step_s = 10 ** rng.uniform(-3, -1)
    slope = rng.uniform(0.0, 0.9)
    calibrated = rng.random() < 0.5
    if calibrated:
        for rows in range(1, 17):
            policy.cost.calibrate(rows, 100, step_s * (1.0 + slope * (rows - 1)))
    heat, kv, batch, trust = 1.0, 100, 1, 0
    played = []
    for _ in range(num_rounds):
        if style in ("drift", "walk"):
            heat *= rng.uniform(0.98, 1.02) if style == "walk" else 1.0 + 0.5 / num_rounds
            kv = 100 if rng.random() < 0.01 else int(kv * rng.uniform(1.0, 1.03)) + 1
        if style in ("batch", "walk") and rng.random() < 0.05:
            batch = rng.randint(1, 6)
        views = [
            RoundView(remaining=1000, context_len=kv, proposed=0, ceiling=15, request=index)
            for index in range(batch)
        ]
        decisions = policy.choose_step(StepView(rounds=tuple(views)))
        widths = [decision.k for decision in decisions]
        classic_s = step_s * heat * (1.0 + 0.1 * (batch - 1)) * (1.0 + kv / 20000)
        noisy_s = classic_s * rng.uniform(0.98, 1.02)
        base_s = policy.cost.value_s(batch, kv * batch)
        value_s = noisy_s if base_s is None else base_s
        draft_s = 0.01 * step_s * sum(widths)
        if not any(widths):
            forward_s, draft_s = noisy_s, 0.02 * step_s * any(d.shadow for d in decisions)
            accepted = [0] * batch
        else:
            rows = batch + sum(widths)
            forward_s = noisy_s * (1.0 + slope * (rows - batch) / batch)
            trust = trust + 1 if style == "trap" else 0
            wins = rng.random() < 0.6 if style in ("random", "walk", "drift", "batch") else False
            if style == "trap":
                wins = trust % 40 < 30
            accepted = [rng.randint(0, k) if wins else 0 for k in widths]
            if style == "greedy":
                forward_s *= rng.choice((1.0, 1.02, 1.05))
            if style == "hiccup" and rng.random() < 0.05:
                forward_s *= rng.choice((2.0, 20.0))
        believed_s = policy.cost.classic_s(batch, kv * batch) or noisy_s
        worst_s = policy.cost.worst_s(batch + sum(widths), kv * batch, widths, believed_s)
        round_s = forward_s + draft_s
        emitted = batch + sum(accepted)
        truth_s = noisy_s if not any(widths) else classic_s
        played.append(
            Played(
                taken_s=round_s,
                classic_s=truth_s * emitted / batch,
                # Only rounds that draft are charged by an estimate.
                delta=value_s / truth_s - 1.0 if any(widths) else 0.0,
                capacity_s=CAPACITY_STEPS * believed_s,
                overshoot_s=max(0.0, round_s - worst_s) if any(widths) else 0.0,
            )
        )
        policy.observe_step(
            StepOutcome(
                rounds=tuple(
                    RoundOutcome(
                        k=k,
                        accepted=hits,
                        emitted=hits + 1,
                        draft_s=0.0,
                        verify_s=0.0,
                        round_s=0.0,
                        request=index,
                        context_len=kv,
                    )
                    for index, (k, hits) in enumerate(zip(widths, accepted, strict=True))
                ),
                draft_s=draft_s,
                verify_s=forward_s,
                round_s=round_s,
            )
        )
    return played


def slack(played: list[Played]) -> tuple[float, float]:
    """Return the smallest (bound - D) over all windows, and the largest D - C, in capacities.

    delta, A and the overshoot are the largest of the whole case.
    """
    delta = max(0.0, *(step.delta for step in played))
    capacity_s = max(step.capacity_s for step in played)
    allowance_s = capacity_s + max(step.overshoot_s for step in played)
    factor = (1.0 + RHO) * (1.0 + delta)
    worst = lost = run = run_lost = 0.0  # largest sum over a window, by Kadane's scan
    for step in played:
        run = max(0.0, run) + step.taken_s - factor * step.classic_s
        run_lost = max(0.0, run_lost) + step.taken_s - step.classic_s
        worst, lost = max(worst, run), max(lost, run_lost)
    return (allowance_s - worst) / capacity_s, lost / capacity_s


def main() -> int:
    """Play the cases; return 1 if any window breaks the bound."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found: dict[str, list[float]] = {style: [] for style in STYLES}
    deltas: dict[str, float] = dict.fromkeys(STYLES, 0.0)
    broken, least, drafted = 0, 1e9, 0
    for case in range(options.cases):
        style = STYLES[case % len(STYLES)]
        rng = random.Random(options.seed * 1_000_003 + case)
        played = play(style, rng, rng.choice((50, 100, 200)))
        margin, lost = slack(played)
        drafted += any(step.overshoot_s or step.taken_s > step.classic_s for step in played)
        broken += margin < -1e-9
        least = min(least, margin)
        found[style].append(lost)
        deltas[style] = max(deltas[style], *(step.delta for step in played))
    for style, losses in found.items():
        lost = max(losses, default=0.0)
        print(f"{style:<8} worst window lost {lost:6.3f} A, largest delta {deltas[style]:.3f}")
    summary = {
        "schema": 1,
        "cases": options.cases,
        "broken": broken,
        "least_slack_in_capacities": round(least, 4),
        "cases_that_lost_something": drafted,
    }
    print(json.dumps(summary))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
