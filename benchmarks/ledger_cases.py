"""Plays adversaries against the loss budget and checks its bound over every window.

    python benchmarks/ledger_cases.py [--cases 10000] [--seed 0] [--jobs 1]

An adversary sees k before it picks how much is accepted and what the round takes. It also moves the
classic step's cost (heat, context), changes the batch, and throws in hiccups: into rounds that
draft, or (style "weather") into any step, as a busy machine does; and it says what the policy's own
thinking takes. After a case the bound of docs/policy.md is checked over every window of its rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from slipstream.policy.base import Decision, RoundOutcome, RoundView, StepOutcome, StepView
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.ledger import CAPACITY_STEPS, RHO, SAVED_STEPS

STYLES = (
    "greedy",
    "trap",
    "random",
    "hiccup",
    "drift",
    "batch",
    "walk",
    "idle",
    "mixed",
    "weather",
    "behind",
)


@dataclass(frozen=True)
class Played:
    """One step: seconds taken, classic seconds of its tokens, and what the theorem names.

    Attributes:
        forgiven_s: debt that was taken back when the step was accounted for.
    """

    taken_s: float
    classic_s: float
    delta: float
    capacity_s: float
    overshoot_s: float
    forgiven_s: float = 0.0


def play(style: str, rng: random.Random, num_rounds: int) -> list[Played]:
    """Return the steps of one case.

    A drafted token takes a hundredth of a step to draft. In style "idle" the drafter is free and
    mostly has nothing to offer, so steps pass by; in "mixed" some requests have a k of their own.
    In "behind" the drafter owns a KV: it reads what it has not seen before it drafts, a chunk at
    most in one step, and offers nothing until it is there.
    """
    free = style == "idle"
    policy = MeasuredPolicy(edges=range(1, 129), paid=not free)
    peek_s = rng.choice((0.001, 0.01, 0.2)) if free else 0.0  # of a step, for each sequence
    step_s = 10 ** rng.uniform(-3, -1)
    slope = rng.uniform(0.0, 0.9)
    think_s = step_s * rng.choice((0.0, 0.003, 0.06))
    reads = style == "behind"
    read_s, chunk = step_s * 10 ** rng.uniform(-4, -1), rng.choice((8, 64, 256))
    behind = [rng.randint(0, 500) if reads else 0 for _ in range(6)]
    calibrated = rng.random() < 0.5
    if calibrated:
        for rows in range(1, 17):
            policy.cost.calibrate(rows, 100, step_s * (1.0 + slope * (rows - 1)))
    if reads:  # as at load, and not quite right
        policy.cost.drafting.calibrate(1, 0.01 * step_s * rng.uniform(0.7, 1.3))
        policy.cost.drafting.calibrate_reading(read_s * rng.uniform(0.7, 1.3))
    heat, kv, batch, trust = 1.0, 100, 1, 0
    fixed: list[int | None] = [None] * 6
    played: list[Played] = []
    forgiven_s = 0.0
    for _ in range(num_rounds):
        if style in ("drift", "walk"):
            heat *= rng.uniform(0.98, 1.02) if style == "walk" else 1.0 + 0.5 / num_rounds
            kv = 100 if rng.random() < 0.01 else int(kv * rng.uniform(1.0, 1.03)) + 1
        if style in ("batch", "walk", "mixed", "idle", "behind") and rng.random() < 0.05:
            batch = rng.randint(1, 6)
        if style == "mixed" and rng.random() < 0.05:
            fixed = [rng.choice((None, 0, rng.randint(1, 15))) for _ in range(6)]
        peeks = free and policy.may_peek
        decides = policy.may_decide or any(fixed[:batch])
        offered = 15 if peeks and rng.random() < 0.1 else 0
        if not policy.may_decide and not any(fixed[:batch]):
            offered = 0
        views = [
            RoundView(
                remaining=1000,
                context_len=kv,
                proposed=offered,
                ceiling=15,
                paid_ceiling=0 if free else 15,
                request=index,
                fixed_k=fixed[index],
                behind=behind[index],
            )
            for index in range(batch)
        ]
        decisions = [Decision(k=0, reason="at rest")] * batch
        if decides and (offered or not free):
            policy.settle()
            decisions = policy.choose_step(StepView(rounds=tuple(views)))
        widths = [decision.k for decision in decisions]
        riding = sum(k for k, own in zip(widths, fixed, strict=False) if own is not None)
        wanted = any(k for k, own in zip(widths, fixed, strict=False) if own is None)
        to_read = sum(behind[index] for index, k in enumerate(widths) if k)
        classic_s = step_s * heat * (1.0 + 0.1 * (batch - 1)) * (1.0 + kv / 20000)
        noise = rng.uniform(0.98, 1.02)
        base_s = classic_s * (1.0 + slope * riding / batch) + 0.01 * step_s * riding
        believed_s = policy.cost.classic_s(batch, kv * batch) or classic_s * noise
        worst_s = policy.cost.worst_s(batch + sum(widths), kv * batch, widths, believed_s, to_read)
        value_s = policy.cost.step_value_s(batch, riding, kv * batch, 0)
        asked = [k for k, own in zip(widths, fixed, strict=False) if own]
        value_s += policy.cost.drafting.drafting_s([] if free else asked)
        left, caught_up = chunk, [0] * batch
        for index, decision in enumerate(decisions):
            if decision.k or decision.shadow:
                caught_up[index] = min(behind[index], left)
                left -= caught_up[index]
                behind[index] -= caught_up[index]
                if behind[index]:
                    widths[index] = 0
        drafts = any(k for k, own in zip(widths, fixed, strict=False) if own is None)
        draft_s = 0.0 if free else 0.01 * step_s * sum(widths)
        draft_s += read_s * sum(caught_up)
        lookup_s = peek_s * step_s * batch * peeks
        choose_s = think_s if decides and (offered or not free) else 0.0
        forward_s = noise * classic_s * (1.0 + slope * sum(widths) / batch)
        accepted = [0] * batch
        if not free and not drafts:
            draft_s += 0.02 * step_s * any(d.shadow for d in decisions)
        if any(widths):
            trust = trust + 1 if style == "trap" else 0
            wins = rng.random() < 0.6 if style not in ("greedy", "trap", "hiccup") else False
            if style == "trap":
                wins = trust % 40 < 30
            accepted = [rng.randint(0, k) if wins else 0 for k in widths]
        if drafts and style == "greedy":
            forward_s *= rng.choice((1.0, 1.02, 1.05))
        if drafts and style == "hiccup" and rng.random() < 0.05:
            forward_s *= rng.choice((2.0, 20.0))
        if style == "weather" and rng.random() < 0.05:
            forward_s += rng.choice((2.0, 20.0)) * step_s
        round_s = forward_s + draft_s + lookup_s + choose_s
        # Without drafts of its own choice, a step is worth what it took, lookups and thinking
        # excepted.
        gained = sum(hits for hits, own in zip(accepted, fixed, strict=False) if own is None)
        spent_s = lookup_s + choose_s + (0.0 if free else draft_s - 0.01 * step_s * riding)
        truth_s = base_s if drafts else round_s - spent_s
        played.append(
            Played(
                taken_s=round_s,
                classic_s=truth_s + classic_s / batch * gained,
                # Only rounds that draft are charged by an estimate.
                delta=value_s / truth_s - 1.0 if drafts else 0.0,
                capacity_s=CAPACITY_STEPS * believed_s,
                overshoot_s=max(0.0, round_s - worst_s) if wanted else choose_s,
                forgiven_s=policy.ledger.forgiven_s - forgiven_s,  # in the step before
            )
        )
        forgiven_s = policy.ledger.forgiven_s
        numbers = list(range(batch))
        if reads:
            for index, hits in enumerate(accepted):
                asked_now = decisions[index].k or decisions[index].shadow
                behind[index] += 0 if asked_now and not behind[index] else hits + 1
        quiet = not offered and not any(widths) and not any(d.shadow for d in decisions)
        quiet = quiet and not any(caught_up)
        if quiet and policy.pass_by(
            numbers,
            kv * batch,
            peek_s=lookup_s,
            choose_s=choose_s,
            round_s=round_s,
        ):
            continue
        policy.observe_step(
            StepOutcome(
                rounds=tuple(
                    RoundOutcome(
                        k=k,
                        paid=k > 0 and not free,
                        accepted=hits,
                        emitted=hits + 1,
                        draft_s=0.0,
                        verify_s=0.0,
                        round_s=0.0,
                        request=index,
                        context_len=kv,
                        fixed=fixed[index] is not None,
                        caught_up=caught_up[index],
                    )
                    for index, (k, hits) in enumerate(zip(widths, accepted, strict=True))
                ),
                draft_s=draft_s,
                peek_s=lookup_s,
                choose_s=choose_s,
                verify_s=forward_s,
                round_s=round_s,
            )
        )
    return played


def slack(played: list[Played]) -> tuple[float, float]:
    """Return the smallest (bound - D) over all windows, and the largest D - C, in capacities.

    delta, A and the overshoot are the largest of the whole case. A window that begins with the run
    has no savings behind it: it is held to the bound without them.
    """
    delta = max(0.0, *(step.delta for step in played))
    capacity_s = max(step.capacity_s for step in played)
    allowance_s = capacity_s + max(step.overshoot_s for step in played)
    saved_s = SAVED_STEPS / CAPACITY_STEPS * capacity_s
    factor = (1.0 + RHO) * (1.0 + delta)
    # Largest sums over a window, by Kadane's scan, and over one from the start.
    worst = lost = run = run_lost = whole = whole_worst = 0.0
    for step in played:
        over_s = step.taken_s - factor * step.classic_s - step.forgiven_s
        run, whole = max(0.0, run) + over_s, whole + over_s
        run_lost = max(0.0, run_lost) + step.taken_s - step.classic_s
        worst, lost = max(worst, run), max(lost, run_lost)
        whole_worst = max(whole_worst, whole)
    margin_s = min(allowance_s - whole_worst, allowance_s + saved_s - worst)
    return margin_s / capacity_s, lost / capacity_s


def judged(case: int, seed: int) -> tuple[str, float, float, float, bool]:
    """Return a case's style, slack, largest loss, largest delta, and whether anything was lost."""
    style = STYLES[case % len(STYLES)]
    rng = random.Random(seed * 1_000_003 + case)
    played = play(style, rng, rng.choice((50, 100, 200)))
    margin, lost = slack(played)
    losing = any(step.overshoot_s or step.taken_s > step.classic_s for step in played)
    return style, margin, lost, max(step.delta for step in played), losing


def main() -> int:
    """Play the cases; return 1 if any window breaks the bound."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    found: dict[str, list[float]] = {style: [] for style in STYLES}
    deltas: dict[str, float] = dict.fromkeys(STYLES, 0.0)
    broken, least, drafted = 0, 1e9, 0
    with Pool(options.jobs) as pool:
        judge = partial(judged, seed=options.seed)
        results = pool.map(judge, range(options.cases), chunksize=50)
    for style, margin, lost, delta, losing in results:
        drafted += losing
        broken += margin < -1e-9
        least = min(least, margin)
        found[style].append(lost)
        deltas[style] = max(deltas[style], delta)
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
