"""The fuzzer: random episodes on one target, each reply compared with its own serial run.

`fuzz_exact.py` says what an episode is and runs it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.config import EngineConfig
from slipstream.drafters.base import Drafter
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.check import Tokenizer
from slipstream.engine.delivery import Item
from slipstream.engine.engine import Engine
from slipstream.engine.pairing import MakeDrafter
from slipstream.engine.target import Target
from slipstream.types import MAX_K, DetailedReply, Reply, SamplingParams

MAX_LEN = 512
LIMITS = {"max_model_len": MAX_LEN, "max_num_seqs": 8, "prefill_chunk": 256}  # compiled for these


@dataclasses.dataclass(kw_only=True)
class Result:
    """What was compared so far."""

    episodes: int = 0
    requests: int = 0
    cancelled: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    differing_tokens: int = 0
    differing_logprobs: int = 0
    differing_texts: int = 0

    @property
    def num_differing(self) -> int:
        """Everything that differs."""
        return self.differing_tokens + self.differing_logprobs + self.differing_texts


@dataclasses.dataclass(kw_only=True)
class Visit:
    """One request of an episode."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    leaves: int | None  # cancelled after so many chunks
    serial: list[Reply] = dataclasses.field(default_factory=list)


class Scripted:
    """Proposes the serial reply, each token wrong with a given rate."""

    name = "scripted"
    max_k = 15

    def __init__(self, script: list[int], rate: float, draw: random.Random, vocab: int) -> None:
        self.script, self.rate, self.draw, self.vocab = script, rate, draw, vocab
        self.free = draw.random() < 0.5

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Return the script's next tokens, some of them wrong."""
        ahead = self.script[len(token_ids) : len(token_ids) + k]
        return [
            self.draw.randrange(self.vocab) if self.draw.random() < self.rate else token
            for token in ahead
        ]

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Learn nothing."""

    def release(self) -> None:
        """Hold nothing."""


class Clock:
    """Seconds that are drawn: a policy decides by them, and does so again from the same seed."""

    def __init__(self, seed: str) -> None:
        self._draw, self._now = random.Random(seed), 0.0

    def __call__(self) -> float:
        """Return a time later than the last."""
        self._now += self._draw.expovariate(1e4)
        return self._now


class Fuzzer:
    """Draws and plays episodes on one target.

    Args:
        source: token ids that prompts are cut from.
        max_tokens: of a reply.
        control: what serial runs take, the target itself by default.
        makers: what drafts for every request; by default each has a drafter of its own.
        limits: what the target was compiled for.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        source: list[int],
        *,
        seed: int | str,
        max_tokens: int,
        control: Target | None = None,
        makers: Sequence[MakeDrafter] = (),
        limits: dict[str, Any] | None = None,
    ) -> None:
        self.target, self.tokenizer, self.source = target, tokenizer, source
        self.control = control or target
        self.draw, self._clock = random.Random(seed), Clock(f"clock {seed}")
        self.max_tokens = max_tokens
        self.result = Result()
        self._drafter: Callable[[], Drafter] | None = None
        self._makers = makers or [self._make_drafter]
        self._limits = limits or LIMITS
        head = target.head
        self._widest = MAX_K if head is None or len(makers) > 1 else head.max_k

    def run(self, num_tokens: int, report: Callable[[Result], None] = lambda _: None) -> Result:
        """Play episodes until so many tokens are compared."""
        while self.result.tokens < num_tokens:
            self.episode()
            report(self.result)
        return self.result

    def episode(self) -> None:
        """Draw requests, run each alone, then run all together and compare."""
        visits = self._visits()
        alone = self._engine(self.control, max_num_seqs=1, prefix_cache="off", k="off")
        for visit in visits:
            plain = dataclasses.replace(visit.params, k=None)
            visit.serial = alone.generate([visit.prompt], plain)
        draw = self.draw
        together = self._engine(
            self.target,
            max_num_seqs=draw.randint(1, 8),
            max_batch_rows=draw.choice([0, 0, 8, 24, 100]),
            prefill_chunk=draw.choice([3, 16, 64, 256, 256]),
            prefix_cache=draw.choice(["on", "on", "off"]),
            verify_pad=draw.choice(["auto", "4"]),
        )
        self._play(together, visits)
        self.result.episodes += 1
        self.result.cached_tokens += together.stats.cached_tokens
        drafting = getattr(self.target.head, "pages", None)
        if together.pages.num_taken or together.num_requests or getattr(drafting, "num_taken", 0):
            raise RuntimeError("an episode left pages or requests behind")

    def _play(self, engine: Engine, visits: list[Visit]) -> None:
        waiting = sorted(visits, key=lambda visit: visit.arrives)
        leaving: list[int] = []
        step = 0
        while waiting or engine.num_requests:
            while waiting and waiting[0].arrives <= step:
                self._submit(engine, waiting.pop(0), leaving)
            engine.step()
            for request_id in leaving:
                engine.cancel(request_id)
            leaving.clear()
            step += 1

    def _submit(self, engine: Engine, visit: Visit, leaving: list[int]) -> None:
        self._drafter = self._draw_drafter(visit)
        choices = engine.check(visit.prompt, visit.params)
        num_chunks = 0

        def receive(item: Item) -> None:
            nonlocal num_chunks
            if isinstance(item, Exception):
                raise item
            num_chunks += 1
            if item.reply is not None:
                self._compare(item.reply, visit.serial[item.choice])
            elif num_chunks == visit.leaves:
                leaving.append(choices[0].id)

        engine.queue(choices, receive)
        self.result.requests += 1

    def _compare(self, got: Reply, expected: Reply) -> None:
        result = self.result
        count = len(got.token_ids)
        is_whole = got.finish_reason != "cancelled"
        result.cancelled += not is_whole
        result.tokens += count
        result.drafted += got.speculation.drafted
        result.accepted += got.speculation.accepted
        wanted = expected.token_ids if is_whole else expected.token_ids[:count]
        result.differing_tokens += abs(len(wanted) - count)
        pairs = zip(got.token_ids, wanted, strict=False)
        result.differing_tokens += sum(a != b for a, b in pairs)
        result.differing_texts += is_whole and got.text != expected.text
        if isinstance(got, DetailedReply) and isinstance(expected, DetailedReply):
            both = zip(got.logprobs or [], expected.logprobs or [], strict=False)
            result.differing_logprobs += sum(a != b for a, b in both)
            result.differing_logprobs += len(got.logprobs or []) != len(
                (expected.logprobs or [])[:count]
            )

    def _engine(self, target: Target, **settings: Any) -> Engine:
        config = EngineConfig(**{**self._limits, **settings})
        makers = self._makers if target is self.target else ()
        return Engine(
            target, self.tokenizer, config=config, make_drafters=makers, clock=self._clock
        )

    def _make_drafter(self) -> Drafter:
        if self._drafter is None:
            return Scripted([], 0.0, self.draw, 1)  # offers nothing
        return self._drafter()

    def _draw_drafter(self, visit: Visit) -> Callable[[], Drafter] | None:
        rate = self.draw.choice([None, None, 0.0, 0.2, 0.5, 1.0])
        if rate is None:
            return self.draw.choice([None, NGramDrafter, NGramDrafter])
        script = visit.prompt + visit.serial[0].token_ids
        return lambda: Scripted(script, rate, self.draw, self.target.arch.vocab_size)

    def _visits(self) -> list[Visit]:
        draw = self.draw
        shared = self._slice(draw.randint(1, 80))
        return [
            Visit(
                prompt=self._prompt(shared),
                params=self._params(),
                arrives=draw.randint(0, 20),
                leaves=draw.choice([None, None, None, draw.randint(1, 10)]),
            )
            for _ in range(draw.randint(1, 10))
        ]

    def _prompt(self, shared: list[int]) -> list[int]:
        draw = self.draw
        own = self._slice(draw.randint(1, 60))
        return draw.choice([own, shared, shared + own, shared[: draw.randint(1, len(shared))]])

    def _slice(self, length: int) -> list[int]:
        start = self.draw.randrange(max(1, len(self.source) - length))
        return self.source[start : start + length]

    def _params(self) -> SamplingParams:
        draw = self.draw
        sampled = draw.random() < 0.6
        return SamplingParams(
            max_tokens=draw.randint(1, self.max_tokens),
            temperature=draw.choice([0.2, 0.7, 1.0]) if sampled else 0.0,
            seed=draw.randrange(2**53),
            top_p=draw.choice([1.0, 0.9]),
            top_k=draw.choice([0, 0, 40]),
            min_p=draw.choice([0.0, 0.0, 0.05]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.0, 1.2]),
            presence_penalty=draw.choice([0.0, 0.0, 0.0, 0.5]),
            stop=draw.choice([(), (), (" the",), ("e", "\n\n")]) if draw.random() < 0.2 else (),
            ignore_eos=draw.random() < 0.5,
            n=draw.choice([1, 1, 1, 1, 2]) if sampled else 1,
            logprobs=draw.choice([None, None, None, 0, 3]),
            k=draw.choice(["auto", "auto", "off", 1, 2, 3, 5, 8, self._widest]),
        )
