"""What k = 0 costs beside an engine that has no drafter.

Engines on one loaded model answer the same prompt in turn, forwards and back: without a drafter,
with one and k off, with k auto and a drafter that never finds anything (the policy alone), and with
k auto and n-gram lookup on a text that repeats nothing (policy and lookup). The first two must not
differ, by 0.3 % at most; what lookup costs is charged to the loss budget.

    python benchmarks/classic_parity.py [MODEL] [--tokens 256] [--laps 20] [--json FILE]

Prints milliseconds a token and the ratio to the engine without a drafter, with a 95 % interval over
laps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import DEFAULT_MODEL, find_model, provenance, sample_text

PROMPT = 64


class Silent:
    """A free drafter that has nothing to offer."""

    name = "silent"
    max_k = 15
    free = True

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Offer nothing."""
        return []

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Learn nothing."""

    def release(self) -> None:
        """Hold nothing."""


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--laps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from engines import Model, interval, reply_to

    from slipstream.drafters.ngram import NGramDrafter

    path = find_model(args.model)
    model = Model(path)
    arms: dict[str, tuple[Any, Any]] = {
        "no drafter": (model.make(None), "off"),
        "off": (model.make(NGramDrafter), "off"),
        "auto, nothing offered": (model.make(Silent), "auto"),
        "auto, lookup": (model.make(NGramDrafter), "auto"),
    }
    prompt = model.tokenizer.encode(sample_text(), parse_special=False)[:PROMPT]
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    rounds: dict[str, int] = dict.fromkeys(arms, 0)
    names = list(arms)
    for lap in range(args.laps + 1):
        for name in names + names[::-1]:
            engine, k = arms[name]
            # Sampled hot, so that nothing repeats and every arm runs the same rounds.
            reply = reply_to(
                engine, prompt, args.tokens, k=k, ignore_eos=True, temperature=1.0, seed=lap
            )
            if lap:
                seconds[name].append(reply.timing.decode_s / (args.tokens - 1))
                rounds[name] += reply.speculation.rounds
    result: dict[str, Any] = {}
    for name, taken in seconds.items():
        pairs = list(zip(taken, seconds["no drafter"], strict=True))
        low, high = interval(pairs)
        ratio = sum(taken) / sum(seconds["no drafter"])
        result[name] = {
            "ms": 1e3 * sum(taken) / len(taken),
            "ratio": ratio,
            "interval": [low, high],
            "rounds": rounds[name],
        }
        print(
            f"{name:<22} {result[name]['ms']:.4f} ms a token  {ratio:.4f}x "
            f"[{low:.4f}, {high:.4f}]  {rounds[name]} speculative rounds"
        )
    line = json.dumps({"provenance": provenance(path), "arms": result})
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
