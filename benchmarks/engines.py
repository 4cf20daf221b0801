"""Engines that share one loaded model, so that what is compared differs in nothing else."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.drafters.base import Drafter
from slipstream.engine.budget import RowBudget
from slipstream.engine.calibrate import calibrate, idle_forwards, row_counts, time_rows
from slipstream.engine.engine import Engine
from slipstream.engine.load import load
from slipstream.engine.pairing import Pairing
from slipstream.types import KSetting, Reply, SamplingParams

CALIBRATION_S = 2.0


class Model:
    """A loaded model and the engines around it; one may run at a time.

    Engines have page pools of their own over the same pages, so no prefix is cached.
    """

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        self.engine = load(path, profile="off", prefix_cache="off", drafter="none", threads=threads)
        self.target = self.engine.target
        self.tokenizer = self.engine.tokenizer

    def make(
        self,
        make_drafter: Callable[[], Drafter] | None,
        *,
        k: KSetting = "auto",
        timed: bool = True,
    ) -> Engine:
        """Return an engine with a policy of its own.

        Args:
            timed: its widths are timed first, as loading does.
        """
        config = dataclasses.replace(self.engine.config, k=k, drafter="auto")
        pairing = Pairing.fresh(config, make_drafter)
        if pairing.policy is not None and timed:
            counts = row_counts(pairing.policy, 1, pairing.policy.max_k + 1)
            budget = RowBudget.of(config, self.target.arch.vocab_size)
            with idle_forwards(self.target, budget, max(counts)) as forwards:
                calibrate(pairing.policy, time_rows(forwards, counts, budget_s=CALIBRATION_S), 0)
        return Engine(
            self.target,
            self.tokenizer,
            template=self.engine._template,
            config=config,
            pairing=pairing,
        )


def reply_to(engine: Engine, prompt: Any, max_tokens: int, **params: Any) -> Reply:
    """Return an engine's reply to one prompt."""
    (reply,) = engine.generate([prompt], SamplingParams(max_tokens=max_tokens, **params))
    return reply


def rest(seconds: float = 0.05) -> None:
    """Let threads park, so that one arm does not run on what the one before left warm."""
    time.sleep(seconds)


def interval(
    pairs: Sequence[tuple[float, float]], seed: int = 0, draws: int = 2000
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of sum(first) / sum(second) over pairs."""
    rng = random.Random(seed)
    ratios = []
    for _ in range(draws):
        chosen = rng.choices(pairs, k=len(pairs))
        ratios.append(sum(a for a, _ in chosen) / sum(b for _, b in chosen))
    ratios.sort()
    return ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]
