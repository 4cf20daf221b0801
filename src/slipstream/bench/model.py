"""Engines that share one loaded model, so that what is compared differs in nothing else."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from slipstream.config import EngineConfig
from slipstream.engine.budget import RowBudget
from slipstream.engine.calibrate import (
    calibrate,
    idle_forwards,
    room,
    row_counts,
    teach_drafts,
    time_drafts,
    time_reading,
    time_rows,
)
from slipstream.engine.engine import Engine
from slipstream.engine.load import load
from slipstream.engine.pairing import MakeDrafter, Pairing
from slipstream.engine.prompt import Prompt, prompt_ids
from slipstream.kernels.ops import PAGE_SIZE
from slipstream.policy.choose import MeasuredPolicy
from slipstream.types import KSetting, Reply, SamplingParams

CALIBRATION_S = 2.0


class Model:
    """A loaded model and the engines around it; one may run at a time.

    Engines share the pages and the prefixes cached there, so a prompt is read once however many
    of them answer it. Their policies are their own and start from nothing: no profile is read or
    kept.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.target = engine.target
        self.tokenizer = engine.tokenizer
        # Seconds of forwards by row count: as policies are told them, and after a usual prompt.
        self.loaded_s: dict[int, float] = {}
        self.usual_s: dict[int, float] = {}
        # Seconds of the paid drafter's drafts by k, and of a token that it reads to catch up.
        self.drafts_s: dict[int, float] = {}
        self.reading_s: float | None = None

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: EngineConfig | None = None, **settings: Any
    ) -> Model:
        """Load a model and its drafters, which policies learn of later; settings go first."""
        return cls(load(path, config, **(settings | {"profile": "off", "k": "off"})))

    @property
    def make_drafters(self) -> Sequence[MakeDrafter]:
        """What makes the drafters that it was loaded with.

        A draft model reads every prompt and reply itself: in serving it would find the pages of
        repeated ones, and rounds after a rest would look cheaper than those of a new text.
        """
        makers, head = self.engine.pairing.make_drafters, self.target.head
        if head is None:
            return makers
        alone = partial(head.drafter, shares=False)
        return [alone if maker == head.drafter else maker for maker in makers]

    def ids(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids."""
        return list(prompt_ids(prompt, self.tokenizer, self.engine._template))

    def time_widths(self, num_seqs: int, context_len: int) -> None:
        """Time forwards of every row count that so many sequences may need.

        Twice: with nothing read yet, as loading does and policies are told, and after
        `context_len` tokens, as far as the model goes, which is what rounds are predicted by. Pages
        are borrowed as they lie, so this comes before the first reply.
        """
        self.loaded_s = self._timed(num_seqs, 0)
        self.drafts_s = self._drafts_timed()
        positions = min(self.target.max_model_len, self.target.kv.num_pages * PAGE_SIZE)
        limit = positions - max(self.loaded_s)
        self.usual_s = self._timed(num_seqs, max(0, min(context_len, limit)))

    def _timed(self, num_seqs: int, context_len: int) -> dict[int, float]:
        """Return the seconds of forwards at a context, by row count."""
        assert not self.engine.pages.num_published, "the pages hold somebody's prefix"
        policy = MeasuredPolicy(pad_to=self.engine._pad_to)
        budget = RowBudget.of(self.engine.config, self.target.arch.vocab_size)
        counts = row_counts(policy, num_seqs, room(self.target, budget, context_len))
        clock = self.engine._clock
        with idle_forwards(self.target, budget, max(counts), context_len, clock=clock) as forwards:
            forwards.fill(min(budget.prefill, budget.rows))
            if getattr(self.target.step, "captures", False):
                for count in counts:  # a first run compiles and captures
                    forwards(count)
            return time_rows(forwards, counts, budget_s=CALIBRATION_S, clock=clock)

    def _drafts_timed(self) -> dict[int, float]:
        """Return the seconds of the paid drafter's drafts by k, none without one."""
        head, engine = self.target.head, self.engine
        if head is None:
            return {}
        budget = RowBudget.of(engine.config, self.target.arch.vocab_size)
        widest = min(head.max_k + 1, room(self.target, budget))
        with idle_forwards(self.target, budget, widest, clock=engine._clock) as forwards:
            drafts_s = time_drafts(forwards, head, head.max_k, clock=engine._clock)
        self.reading_s = time_reading(head, drafts_s.get(1, 0.0), clock=engine._clock)
        return drafts_s

    def make(
        self,
        *make_drafters: MakeDrafter,
        k: KSetting = "auto",
        timed: bool = True,
    ) -> Engine:
        """Return an engine with a policy of its own.

        Args:
            timed: its policy knows what forwards take, as it does after loading.
        """
        config = dataclasses.replace(self.engine.config, k=k)
        pairing = Pairing.fresh(config, make_drafters)
        if pairing.policy is not None and timed:
            calibrate(pairing.policy, self.loaded_s or self._timed(1, 0), 0)
            teach_drafts(pairing.policy.cost.drafting, self.drafts_s, self.reading_s)
        return Engine(
            self.target,
            self.tokenizer,
            template=self.engine._template,
            config=config,
            pairing=pairing,
            pages=self.engine.pages,
            clock=self.engine._clock,
        )


def reply_to(engine: Engine, prompt: Any, max_tokens: int, **params: Any) -> Reply:
    """Return an engine's reply to one prompt."""
    (reply,) = engine.generate([prompt], SamplingParams(max_tokens=max_tokens, **params))
    return reply


def rest(seconds: float = 0.02) -> None:
    """Let threads park, so that one arm does not run on what the one before left warm."""
    time.sleep(seconds)


def seconds_of(times_s: dict[int, float], num_rows: int) -> float:
    """Return the seconds of a forward, between those of the row counts around it.

    Args:
        times_s: seconds by row count, not empty.
    """
    counts = sorted(times_s)
    above = next((count for count in counts if count >= num_rows), counts[-1])
    below = next((count for count in reversed(counts) if count <= num_rows), counts[0])
    if above <= below:
        return times_s[above] * (num_rows / above if num_rows > above else 1.0)
    share = (num_rows - below) / (above - below)
    return times_s[below] + share * (times_s[above] - times_s[below])
