"""What k = 0 costs beside an engine that has no drafter.

Engines on one loaded model answer the same prompt with the same seed, sampled hot so that nothing
repeats; sixteen steps of each are run in turn, in random order, so that the machine's clock is the
same for all. They are: no drafter, twice (how far equals differ); a drafter and k off; k auto and a
drafter that never finds anything (the policy alone); k auto and n-gram lookup (policy and lookup).
Steps that draft do not count. A step's time is all of `Engine.step`. Means over steps, those beyond
1.5 times the median left out (hiccups of the machine), and a 95 % interval over laps.

    python benchmarks/classic_parity.py [MODEL] [--tokens 192] [--laps 24] [--json FILE]

The bar is 0.3 % for all but lookup, whose own time is charged to the loss budget.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from provenance import DEFAULT_MODEL, find_model, provenance, sample_text

PROMPT = 64
HICCUP = 1.5
BLOCK = 16


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


class Arm:
    """An engine, and the seconds of its classic steps by lap."""

    def __init__(self, engine: Any, k: str) -> None:
        self.engine, self.k = engine, k
        self.laps: list[list[float]] = []
        self.num_rows = 0
        step = engine.target.step

        def counted(rows: Any) -> Any:
            self.num_rows = len(rows.token_ids)
            return step(rows)

        engine.target = replace(engine.target, step=counted)

    def start(self, prompt: list[int], tokens: int, seed: int) -> None:
        """Queue a reply and read its prompt."""
        from slipstream.types import SamplingParams

        params = SamplingParams(
            max_tokens=tokens, k=self.k, ignore_eos=True, temperature=1.0, seed=seed
        )
        self.engine.submit(prompt, params)
        self.engine.step()
        self.laps.append([])

    def step(self) -> None:
        """Run and time a step, if there is one left."""
        if not self.engine.num_requests:
            return
        began = time.perf_counter()
        self.engine.step()
        seconds = time.perf_counter() - began
        if self.num_rows == 1:
            self.laps[-1].append(seconds)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--laps", type=int, default=24)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from slipstream.bench.model import Model
    from slipstream.drafters.ngram import NGramDrafter

    path = find_model(args.model)
    model = Model.load(path, prefix_cache="off")
    drafters = {
        "no drafter": (None, "off"),
        "no drafter, again": (None, "off"),
        "off": (NGramDrafter, "off"),
        "auto, nothing offered": (Silent, "auto"),
        "auto, lookup": (NGramDrafter, "auto"),
    }
    arms = {
        name: Arm(model.make(*([drafter] if drafter else [])), k)
        for name, (drafter, k) in drafters.items()
    }
    prompt = model.tokenizer.encode(sample_text(), parse_special=False)[:PROMPT]
    for lap in range(args.laps + 1):
        for arm in arms.values():
            arm.start(prompt, args.tokens, lap)
        order, rng = list(arms.values()), random.Random(lap)
        while any(arm.engine.num_requests for arm in order):
            for arm in order:
                for _ in range(BLOCK):
                    arm.step()
            rng.shuffle(order)
    result = compare(arms)
    line = json.dumps({"provenance": provenance(path), "arms": result})
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    return 0


def compare(arms: dict[str, Arm]) -> dict[str, Any]:
    """Print and return each arm's mean step and its ratio to the engine without a drafter."""
    from slipstream.bench.interval import Passes, interval

    limit = HICCUP * statistics.median(s for arm in arms.values() for lap in arm.laps for s in lap)
    means = {
        name: [
            statistics.fmean(s for s in lap if s <= limit) for lap in arm.laps[1:]
        ]  # the first lap warms up
        for name, arm in arms.items()
    }
    base = means["no drafter"]
    result = {}
    for name, taken in means.items():
        laps = [
            (Passes(tokens=[1], seconds=[plain]), Passes(tokens=[1], seconds=[own]))
            for own, plain in zip(taken, base, strict=True)
        ]
        low, high = interval([laps]) or (math.nan, math.nan)
        result[name] = {
            "ms": 1e3 * statistics.fmean(taken),
            "ratio": sum(taken) / sum(base),
            "interval": [low, high],
            "steps": sum(len(lap) for lap in arms[name].laps[1:]),
        }
        print(
            f"{name:<22} {result[name]['ms']:.4f} ms a step  {result[name]['ratio']:.4f}x "
            f"[{low:.4f}, {high:.4f}]  {result[name]['steps']} steps"
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
