"""Live speculation with n-gram lookup against classic decoding, category by category.

Each prompt is answered four times, classic, auto, auto, classic, by two engines on one loaded
model; decode time counts, from the first token to the last, and the texts must be equal. A category
goes on, first turns before second ones, until it has enough tokens. The policy starts with what
loading measures and learns on from category to category, as a server does.

    python benchmarks/speculation.py PROMPTS.jsonl [--model NAME] [--tokens 2000]
                                     [--max-tokens 400] [--categories A,B] [--json FILE]

PROMPTS has one JSON object a line with `category` and `turns`. Prints a line a category and one
JSON line last. `loss` is what the loss budget was charged in net, as a share of classic time: below
zero is a gain.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import DEFAULT_MODEL, find_model, provenance

ORDER = ("classic", "auto", "auto", "classic")


@dataclass
class Tally:
    """Seconds and counts of one category."""

    prompts: int = 0
    tokens: int = 0
    pairs: list[tuple[float, float]] = field(default_factory=list)
    rounds: int = 0
    classic_rounds: int = 0
    accepted: int = 0
    mismatches: int = 0


def conversations(questions: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield (question, turn), all first turns before the second ones."""
    for turn in range(2):
        for number, question in enumerate(questions):
            if turn < len(question["turns"]):
                yield number, question["turns"][turn]


def run_category(classic: Any, auto: Any, questions: list[dict[str, Any]], args: Any) -> Tally:
    """Answer a category's questions until there are enough tokens."""
    from engines import reply_to, rest

    tally = Tally()
    history: dict[int, list[dict[str, str]]] = {}
    for number, text in conversations(questions):
        if tally.tokens >= args.tokens:
            break
        messages = [*history.get(number, []), {"role": "user", "content": text}]
        seconds = {"classic": 0.0, "auto": 0.0}
        replies = {}
        for arm in ORDER:
            engine = classic if arm == "classic" else auto
            replies[arm] = reply = reply_to(engine, messages, args.max_tokens)
            seconds[arm] += reply.timing.decode_s
            rest()
        report = replies["auto"].speculation
        tally.prompts += 1
        tally.tokens += replies["classic"].usage.completion_tokens
        tally.pairs.append((seconds["classic"], seconds["auto"]))
        tally.rounds += report.rounds
        tally.classic_rounds += report.classic_rounds
        tally.accepted += report.accepted
        tally.mismatches += replies["auto"].token_ids != replies["classic"].token_ids
        history[number] = [*messages, {"role": "assistant", "content": replies["classic"].text}]
    return tally


def summary(tally: Tally, ledger: Any, before: tuple[float, float]) -> dict[str, Any]:
    """Return a category's figures as JSON values."""
    from engines import interval

    low, high = interval(tally.pairs)
    value_s = ledger.value_s - before[1]
    return {
        "prompts": tally.prompts,
        "tokens": tally.tokens,
        "speedup": round(sum(a for a, _ in tally.pairs) / sum(b for _, b in tally.pairs), 4),
        "interval": [round(low, 4), round(high, 4)],
        "loss": round((ledger.net_s - before[0]) / value_s, 5) if value_s else 0.0,
        "rounds": tally.rounds,
        "classic_rounds": tally.classic_rounds,
        "acceptance_length": round(1 + tally.accepted / tally.rounds, 3) if tally.rounds else None,
        "mismatches": tally.mismatches,
    }


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--categories", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from engines import Model, reply_to

    from slipstream.drafters.ngram import NGramDrafter

    path = find_model(args.model)
    model = Model(path)
    classic, auto = model.make(None), model.make(NGramDrafter)
    policy = auto.policy
    assert policy is not None
    questions = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    wanted = (
        args.categories.split(",")
        if args.categories
        else sorted({q["category"] for q in questions})
    )
    reply_to(classic, "Warm up.", 64, k="off")
    results: dict[str, Any] = {}
    for category in wanted:
        own = [question for question in questions if question["category"] == category]
        before = policy.ledger.net_s, policy.ledger.value_s
        tally = run_category(classic, auto, own, args)
        results[category] = row = summary(tally, policy.ledger, before)
        length = "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
        print(
            f"{category:<16} {row['prompts']:>3} prompts {row['tokens']:>5} tokens  "
            f"{row['speedup']:.3f}x [{row['interval'][0]:.3f}, {row['interval'][1]:.3f}]  "
            f"loss {100 * row['loss']:+.2f} %  {row['rounds']:>4} + {row['classic_rounds']:>4} "
            f"rounds, acceptance length {length}, {row['mismatches']} mismatches",
            flush=True,
        )
    line = json.dumps({"provenance": provenance(path), "categories": results})
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    return int(any(row["mismatches"] for row in results.values()))


if __name__ == "__main__":
    sys.exit(main())
