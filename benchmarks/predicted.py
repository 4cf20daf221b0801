"""Predicted against measured speedup, on real forwards with a drafter of known acceptance.

What is predicted comes from before the cell: forwards and proposals timed outside serving, the
host's work as rounds of another width (k = 5) had it, classic steps measured in serving, and the
acceptance that the scripted drafter is told to have. What is measured comes from the cell: tokens a
second at a fixed k over tokens a second of classic decoding, in turn on one loaded model. Nothing
that a cell's rounds took enters its prediction. A lap whose two classic replies differ by more than
4 % is run again, whatever came out: the machine changed under it.

    python benchmarks/predicted.py [MODEL] [--tokens 160] [--laps 6] [--json FILE]

Prints predicted and measured S of each cell, their ratio, and how many cells are within 5 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import DEFAULT_MODEL, find_model, provenance, sample_text

WIDTHS = (1, 2, 3, 4, 7)
RATES = (0.0, 0.3, 0.56, 0.8, 1.0)
PROMPT = 64
WITHIN = 0.05
# The middle of what a cell's replies run through, and passes of each timing.
CONTEXT = 144
PASSES = 12
OTHER_WIDTH = 5
UNSTEADY = 0.04


def timed(model: Any, k: int) -> float:
    """Return the seconds of a verify, timed outside serving in turn with classic forwards."""
    from slipstream.engine.budget import RowBudget
    from slipstream.engine.calibrate import idle_forwards, time_rows

    budget = RowBudget.of(model.engine.config, model.target.arch.vocab_size)
    with idle_forwards(model.target, budget, k + 1, CONTEXT) as forwards:
        forwards.fill(CONTEXT)
        times_s = time_rows(forwards, [1, k + 1], passes=PASSES, budget_s=5.0)
    return times_s[k + 1]


def draft_seconds(drafter: Any, script: list[int], k: int) -> float:
    """Return the seconds of one proposal."""
    ends = range(PROMPT + 1, PROMPT + 101)
    began = time.perf_counter()
    for end in ends:
        drafter.propose(script[:end], k)
    return (time.perf_counter() - began) / len(ends)


def host_seconds(model: Any, script: list[int], args: Any) -> float:
    """Return what rounds take beside forward and drafting, from a width that no cell has."""
    from slipstream.bench.model import reply_to
    from slipstream.drafters.scripted import ScriptedDrafter, ScriptedSpec

    spec = ScriptedSpec(rates=(0.5,), seed=99)
    vocab_size = model.target.arch.vocab_size
    engine = model.make(
        lambda: ScriptedDrafter([script], spec, vocab_size=vocab_size), k=OTHER_WIDTH, timed=False
    )
    for _ in range(2):
        reply_to(engine, script[:PROMPT], args.tokens, ignore_eos=True)
    return float(engine.policy.cost.overhead_s)


@dataclass
class Lap:
    """One prediction and what was measured right after it, seconds of replies of equal length."""

    predicted: float
    classic_s: tuple[float, float]
    spent_s: float
    accepted: int
    rounds: int


def run_lap(
    model: Any,
    classic: Any,
    script: list[int],
    k: int,
    rate: float,
    host_s: float,
    number: int,
    args: Any,
) -> Lap:
    """Predict, then reply classic, drafted, drafted, classic."""
    from slipstream.bench.model import reply_to
    from slipstream.drafters.scripted import ScriptedDrafter, ScriptedSpec
    from slipstream.policy.estimate import speedup

    vocab_size = model.target.arch.vocab_size
    specs = [ScriptedSpec(rates=(rate,), seed=2 * number + turn) for turn in range(2)]
    drafters = [ScriptedDrafter([script], spec, vocab_size=vocab_size) for spec in specs]
    verify_s = timed(model, k)
    first = reply_to(classic, script[:PROMPT], args.tokens, ignore_eos=True)
    classic_s = first.timing.decode_s / (args.tokens - 1)
    round_s = verify_s + draft_seconds(drafters[0], script, k) + host_s
    lap = Lap(speedup(specs[0].acceptance_length(k), classic_s, round_s), (0.0, 0.0), 0.0, 0, 0)
    for drafter in drafters:
        engine = model.make(lambda drafter=drafter: drafter, k=k, timed=False)
        reply = reply_to(engine, script[:PROMPT], args.tokens, ignore_eos=True)
        assert [*script[:PROMPT], *reply.token_ids] == script, "the text changed"
        lap.spent_s += reply.timing.decode_s
        lap.accepted += reply.speculation.accepted
        lap.rounds += reply.speculation.rounds
    last = reply_to(classic, script[:PROMPT], args.tokens, ignore_eos=True)
    lap.classic_s = first.timing.decode_s, last.timing.decode_s
    return lap


def run_cell(
    model: Any, script: list[int], k: int, rate: float, host_s: float, args: Any
) -> dict[str, Any]:
    """Predict a cell, then measure it."""
    from slipstream.bench.interval import interval
    from slipstream.drafters.scripted import ScriptedSpec

    classic = model.make()
    laps: list[Lap] = []
    unsteady = 0
    while len(laps) < args.laps:
        lap = run_lap(model, classic, script, k, rate, host_s, len(laps), args)
        if abs(lap.classic_s[0] - lap.classic_s[1]) > UNSTEADY * min(lap.classic_s):
            unsteady += 1
            if unsteady <= 2 * args.laps:
                continue
        laps.append(lap)
    pairs = [(sum(lap.classic_s), lap.spent_s) for lap in laps]
    accepted, rounds = sum(lap.accepted for lap in laps), sum(lap.rounds for lap in laps)
    measured = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    mean = sum(lap.predicted for lap in laps) / len(laps)
    low, high = interval([[_passes(lap) for lap in laps]]) or (math.nan, math.nan)
    return {
        "k": k,
        "rate": rate,
        "predicted": round(mean, 4),
        "measured": round(measured, 4),
        "interval": [round(low, 4), round(high, 4)],
        "ratio": round(mean / measured, 4),
        "told_acceptance_length": round(ScriptedSpec(rates=(rate,)).acceptance_length(k), 4),
        "seen_acceptance_length": round(1 + accepted / rounds, 4),
        "unsteady_laps": unsteady,
    }


def _passes(lap: Lap) -> Any:
    """Return a lap as the drafted and the classic passes of one prompt."""
    from slipstream.bench.interval import Passes

    drafted = Passes(tokens=[2], seconds=[lap.spent_s])
    return drafted, Passes(tokens=[1, 1], seconds=lap.classic_s)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--laps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from slipstream.bench.model import Model, reply_to

    path = find_model(args.model)
    model = Model.load(path, prefix_cache="off")
    prompt = model.tokenizer.encode(sample_text(), parse_special=False)[:PROMPT]
    told = reply_to(model.make(), prompt, args.tokens, ignore_eos=True)
    script = [*prompt, *told.token_ids]
    host_s = host_seconds(model, script, args)
    cells = []
    print(f"{'k':>2} {'rate':>5} {'predicted':>10} {'measured':>9} {'ratio':>7}")
    for k in WIDTHS:
        for rate in RATES:
            cells.append(cell := run_cell(model, script, k, rate, host_s, args))
            print(
                f"{k:>2} {rate:>5} {cell['predicted']:>9.3f}x {cell['measured']:>8.3f}x "
                f"{cell['ratio']:>7.3f}",
                flush=True,
            )
    close = sum(abs(cell["ratio"] - 1) <= WITHIN for cell in cells)
    print(f"{close} of {len(cells)} cells within {100 * WITHIN:.0f} %")
    line = json.dumps({"provenance": provenance(path), "cells": cells, "within": close})
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
