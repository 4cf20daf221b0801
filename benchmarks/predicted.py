"""Predicted against measured speedup, on real forwards with a drafter of known acceptance.

What is predicted comes from before the cell: widths timed outside serving, classic steps measured
in serving, and the acceptance that the scripted drafter is told to have. What is measured comes
from the cell: tokens a second at a fixed k over tokens a second of classic decoding, in turn on one
loaded model. Nothing that a cell's rounds took enters its prediction.

    python benchmarks/predicted.py [MODEL] [--tokens 256] [--laps 4] [--json FILE]

Prints predicted and measured S of each cell, their ratio, and how many cells are within 5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from provenance import DEFAULT_MODEL, find_model, provenance, sample_text

WIDTHS = (1, 2, 3, 4, 7)
RATES = (0.0, 0.3, 0.56, 0.8, 1.0)
PROMPT = 64
WITHIN = 0.05
# The middle of what a cell's replies run through, and passes of each timing.
CONTEXT = 192
PASSES = 12


def timed(model: Any, k: int) -> tuple[float, float]:
    """Return the seconds of a classic forward and of a verify, timed in turn outside serving."""
    from slipstream.engine.calibrate import idle_forwards, time_rows

    with idle_forwards(model.target, k + 1, CONTEXT) as forwards:
        forwards.fill(CONTEXT)
        times_s = time_rows(forwards, [1, k + 1], passes=PASSES, budget_s=5.0)
    return times_s[1], times_s[k + 1]


def draft_seconds(drafter: Any, script: list[int], k: int) -> float:
    """Return the seconds of one proposal."""
    ends = range(PROMPT + 1, PROMPT + 101)
    began = time.perf_counter()
    for end in ends:
        drafter.propose(script[:end], k)
    return (time.perf_counter() - began) / len(ends)


def run_cell(model: Any, script: list[int], k: int, rate: float, args: Any) -> dict[str, Any]:
    """Predict a cell, then measure it."""
    from engines import interval, reply_to

    from slipstream.drafters.scripted import ScriptedDrafter, ScriptedSpec
    from slipstream.policy.estimate import speedup

    classic = model.make(None)
    vocab_size = model.target.arch.vocab_size
    predicted, pairs, accepted, rounds = [], [], 0, 0
    for lap in range(args.laps):
        specs = [ScriptedSpec(rates=(rate,), seed=2 * lap + turn) for turn in range(2)]
        drafters = [ScriptedDrafter([script], spec, vocab_size=vocab_size) for spec in specs]
        one_s, verify_s = timed(model, k)
        first = reply_to(classic, script[:PROMPT], args.tokens, ignore_eos=True)
        classic_s = first.timing.decode_s / (args.tokens - 1)
        host_s = classic_s - one_s  # what a classic step takes beside its forward
        round_s = verify_s + draft_seconds(drafters[0], script, k) + host_s
        predicted.append(speedup(specs[0].acceptance_length(k), classic_s, round_s))
        seconds = 0.0
        for drafter in drafters:
            engine = model.make(lambda drafter=drafter: drafter, k=k, timed=False)
            reply = reply_to(engine, script[:PROMPT], args.tokens, ignore_eos=True)
            assert [*script[:PROMPT], *reply.token_ids] == script, "the text changed"
            seconds += reply.timing.decode_s
            accepted += reply.speculation.accepted
            rounds += reply.speculation.rounds
        last = reply_to(classic, script[:PROMPT], args.tokens, ignore_eos=True)
        pairs.append((first.timing.decode_s + last.timing.decode_s, seconds))
    measured = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    mean = sum(predicted) / len(predicted)
    low, high = interval(pairs)
    return {
        "k": k,
        "rate": rate,
        "predicted": round(mean, 4),
        "measured": round(measured, 4),
        "interval": [round(low, 4), round(high, 4)],
        "ratio": round(mean / measured, 4),
        "told_acceptance_length": round(specs[0].acceptance_length(k), 4),
        "seen_acceptance_length": round(1 + accepted / rounds, 4),
    }


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--laps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from engines import Model, reply_to

    path = find_model(args.model)
    model = Model(path)
    prompt = model.tokenizer.encode(sample_text(), parse_special=False)[:PROMPT]
    told = reply_to(model.make(None), prompt, args.tokens, ignore_eos=True)
    script = [*prompt, *told.token_ids]
    cells = []
    print(f"{'k':>2} {'rate':>5} {'predicted':>10} {'measured':>9} {'ratio':>7}")
    for k in WIDTHS:
        for rate in RATES:
            cells.append(cell := run_cell(model, script, k, rate, args))
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
