"""T(1), T(4) and T(8) in units of llama.cpp Q4_0's one-row step, all interleaved.

`cpu_step.py` times one row count after the other; on a machine whose speed drifts over minutes
their ratios then compare different minutes. Here every trial times all of them in turn: ours at 1,
4 and 8 rows, llama.cpp's Q4_0 requantisation at 1 row with flash attention on and off (the better
counts), each the median of a few steps. Ratios are medians over trials of the trial's own ratio.

    python benchmarks/cpu_rows.py --llama-python PATH [--trials 9] [--context 256]

One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from measure import CONTEXT, Prompts, step_seconds
from provenance import DEFAULT_MODEL, find_model, provenance, sample_text
from sides import Contender, llama, num_cores, ours

ROWS = (1, 4, 8)
BARS = {1: 0.62, 4: 0.75, 8: 1.0}
REPEAT = 8


def main() -> int:
    """Run the trials, print the table, and return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--llama-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--context", type=int, default=CONTEXT)
    args = parser.parse_args()
    model, threads = find_model(args.model), num_cores()
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        own, peer = ours(), llama(args.llama_python)
        q4_0 = Path(folder) / "q4_0.gguf"
        own.ask("load", path=str(model), threads=threads)
        peer.ask("quantize", source=str(model), target=str(q4_0))
        peer.ask("load", path=str(q4_0))
        prompts = Prompts(token_ids=own.ask("tokenize", text=sample_text())["token_ids"])
        mine = Contender(side=own, label="ours")
        theirs = [
            Contender(
                side=peer, label=f"fa={fa}", options={"threads": threads, "variant": [fa, 512]}
            )
            for fa in (0, 1)
        ]
        trials: list[dict[str, float]] = []
        for _ in range(args.trials):
            one = step_seconds(prompts, args.context, 1, REPEAT)
            trial = {"peer": min(one(contender) for contender in theirs)}
            for rows in ROWS:
                trial[str(rows)] = step_seconds(prompts, args.context, rows, REPEAT)(mine)
            trials.append(trial)
        own.close()
        peer.close()
    unit = statistics.median(trial["peer"] for trial in trials)
    print(f"llama.cpp Q4_0, one row after {args.context} tokens: {unit * 1e3:.2f} ms")
    ratios = {r: statistics.median(t[str(r)] / t["peer"] for t in trials) for r in ROWS}
    for rows, ratio in ratios.items():
        own_ms = statistics.median(trial[str(rows)] for trial in trials) * 1e3
        verdict = "pass" if ratio <= BARS[rows] else "MISS"
        print(f"T({rows})  {own_ms:.2f} ms  {ratio:.3f} of it  <= {BARS[rows]} {verdict}")
    result = {"schema": "cpu_rows/1", "provenance": provenance(model), "context": args.context}
    print(json.dumps(result | {"trials": trials, "ratios": ratios}))
    return int(any(ratio > BARS[rows] for rows, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
