"""How many of an assistant's drafts are accepted, by k and category, in the engine itself.

    python benchmarks/assistant_acceptance.py MODEL --drafter FOLDER --workload FILE --json OUT

Every conversation's first turn is answered with at most 128 tokens at a fixed k, greedy or sampled
with the conversation's number as seed. Acceptance is a matter of text, not of time, so several are
answered at once and a busy machine does no harm. The overall figure is over all rounds.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import slipstream
from slipstream import SamplingParams
from slipstream.bench.workload import open_workload

MAX_TOKENS = 128
TOGETHER = 6


def measure(args: argparse.Namespace, k: int) -> dict[str, Any]:
    """Answer the workload at one k."""
    workload = open_workload(args.workload)
    engine = slipstream.load(
        args.model,
        drafter=args.drafter,
        k=k,
        profile="off",
        max_num_seqs=TOGETHER,
        max_model_len=args.max_model_len,
    )
    asked = {}
    for number, item in enumerate(workload.conversations):
        params = SamplingParams(
            max_tokens=MAX_TOKENS, temperature=args.temperature, seed=args.seed + number
        )
        asked[engine.submit(item.messages(0, []), params)] = item.category
    by_round: Counter[int] = Counter()
    totals: dict[str, list[int]] = {}
    seen: dict[int, list[int]] = {request: [] for request in asked}
    while engine.num_requests:
        for output in engine.step():
            if output.chunk.token_ids:
                seen[output.request_id].append(output.chunk.accepted)
            if output.chunk.reply is not None:
                said = output.chunk.reply.speculation
                total = totals.setdefault(asked[output.request_id], [0, 0])
                total[0] += said.rounds
                total[1] += said.accepted
                # The first is prefill's, the last may have been cut short.
                by_round.update(seen[output.request_id][1:-1])
    rounds, accepted = (sum(total[i] for total in totals.values()) for i in range(2))
    return {
        "k": k,
        "temperature": args.temperature,
        "conversations": len(asked),
        "acceptance_length": 1 + accepted / rounds,
        "accepted_by_round": [by_round[number] for number in range(k + 1)],
        "categories": {
            name: {"rounds": own[0], "acceptance_length": 1 + own[1] / max(own[0], 1)}
            for name, own in totals.items()
        },
    }


def main() -> None:
    """Measure every k and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--drafter", default="assistant")
    parser.add_argument("--workload", default="built-in")
    parser.add_argument("--k-values", default="4")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for k in map(int, args.k_values.split(",")):
        results.append(measure(args, k))
        print(json.dumps(results[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
