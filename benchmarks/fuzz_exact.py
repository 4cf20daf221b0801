"""Count tokens that differ between batched, drafted, cached runs and serial ones: none may.

Episodes are drawn at random: an engine (sequences at once, row budget, prefill chunk, padding,
prefix cache, size of the KV pool), and requests that arrive at random steps, some of which are
cancelled. Each has a prompt of its own or shares a beginning, parameters (greedy or sampled,
filters, penalties, logprobs, several choices), a width k, and a drafter: none, n-gram, or a script
of the very reply, right, wrong or uneven. Each reply is compared with a run of the same prompt,
parameters and seed alone, one token a step, nothing drafted or cached.

    python benchmarks/fuzz_exact.py [MODEL] [--tokens 100000] [--seed 0] [--threads 0] [--tiny]
    python benchmarks/fuzz_exact.py --worlds [--seconds 600] [--seed 0] [--only INDEX]

`--tiny` takes a random decoder of two layers instead of a model file. `--worlds` draws models: tiny
ones of every family, in GGUF's and MLX's kinds and from folders that are rounded at load, with
draft models and assistants, Gemma 4's pair among them, on every back end and one to three threads;
what is right comes from the same model on one thread. Engines see a clock that is drawn as well, so
a seed and an index play the same world again. Prints one JSON line last; exit code 1 if anything
differs or fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

from slipstream.config import EngineConfig  # noqa: E402
from slipstream.drafters.base import Drafter  # noqa: E402
from slipstream.drafters.ngram import NGramDrafter  # noqa: E402
from slipstream.engine.check import Tokenizer  # noqa: E402
from slipstream.engine.delivery import Item  # noqa: E402
from slipstream.engine.engine import Engine  # noqa: E402
from slipstream.engine.pairing import MakeDrafter  # noqa: E402
from slipstream.engine.target import Target  # noqa: E402
from slipstream.types import MAX_K, DetailedReply, Reply, SamplingParams  # noqa: E402

if TYPE_CHECKING:
    from fuzz_worlds import World

MAX_LEN = 512
EPISODES = 4  # of a world
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


def real_target(model: str, threads: int) -> tuple[Target, Tokenizer, list[int]]:
    """Load a model; prompts are cut from ordinary text."""
    from provenance import find_model, sample_text

    import slipstream

    engine = slipstream.load(find_model(model), EngineConfig(**LIMITS, threads=threads))
    source = engine.tokenizer.encode(sample_text(), parse_special=False)
    return engine.target, engine.tokenizer, source


def tiny_target() -> tuple[Target, Tokenizer, list[int]]:
    """Build a random decoder; prompts are cut from a text that repeats itself at times."""
    from slipstream.engine.target import build_target
    from tests.fake_model import FakeTokenizer
    from tests.tiny import make_backend, tiny_arch, tiny_tensors, tiny_weights

    arch = tiny_arch(context_len=MAX_LEN)
    tensors = tiny_tensors(arch)
    target = build_target(
        arch,
        make_backend("cpu-auto", threads=1),
        lambda backend: tiny_weights(backend, tensors),
        EngineConfig(**LIMITS),
    )
    draw = random.Random(7)
    motif = [draw.randrange(arch.vocab_size) for _ in range(40)]
    source = [draw.randrange(arch.vocab_size) for _ in range(300)] + motif * 4
    return target, FakeTokenizer(stop_ids=[3]), source


def play_world(seed: int, index: int) -> tuple[dict[str, Any], Result]:
    """Draw one world and play some episodes; what it was and what was compared."""
    from fuzz_worlds import draw_world

    from tests.fake_model import FakeTokenizer

    with tempfile.TemporaryDirectory() as folder:
        world: World = draw_world(random.Random(f"{seed} {index}"), Path(folder))
        fuzzer = Fuzzer(
            world.target,
            FakeTokenizer(stop_ids=[3]),
            world.source,
            seed=f"{seed} {index}",
            max_tokens=80,
            control=world.control,
            makers=world.makers,
            limits=world.limits,
        )
        for _ in range(EPISODES):
            fuzzer.episode()
    return world.what, fuzzer.result


def play_worlds(seed: int, *, seconds: float, only: int | None) -> int:
    """Play worlds until time is over, print what came of them, return the exit code."""
    began, index = time.perf_counter(), 0 if only is None else only
    total, failed, kinds = Result(), [], set[str]()
    while True:
        try:
            what, result = play_world(seed, index)
        except Exception:
            traceback.print_exc()
            print(f"world {index} of seed {seed} failed", file=sys.stderr)
            failed.append(index)
        else:
            kinds.add(f"{what['family']}, {what['drafter']}")
            for field in dataclasses.fields(Result):
                mine = getattr(total, field.name) + getattr(result, field.name)
                setattr(total, field.name, mine)
            if result.num_differing or only is not None:
                print(f"world {index} of seed {seed}: {what}: {result}", file=sys.stderr)
            if result.num_differing:
                failed.append(index)
        index += 1
        if only is not None or time.perf_counter() - began > seconds:
            break
    facts = {
        "seed": seed,
        "worlds": 1 if only is not None else index,
        "families_and_drafters": len(kinds),
        "failed_worlds": failed,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(f"{total.tokens} tokens compared, {total.differing_tokens} differ")
    print(json.dumps({**facts, **dataclasses.asdict(total)}))
    return 1 if failed else 0


def main() -> int:
    """Fuzz, print what was compared, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens to compare at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0 takes all cores")
    parser.add_argument("--tiny", action="store_true", help="a random decoder of two layers")
    parser.add_argument("--worlds", action="store_true", help="draw models as well")
    parser.add_argument("--seconds", type=float, default=600.0, help="with --worlds")
    parser.add_argument("--only", type=int, help="with --worlds: one of them, by its number")
    arguments = parser.parse_args()
    if arguments.worlds:
        return play_worlds(arguments.seed, seconds=arguments.seconds, only=arguments.only)
    if arguments.tiny:
        target, tokenizer, source = tiny_target()
    else:
        target, tokenizer, source = real_target(arguments.model, arguments.threads)
    fuzzer = Fuzzer(target, tokenizer, source, seed=arguments.seed, max_tokens=200)
    began = time.perf_counter()
    said = 0

    def report(result: Result) -> None:
        nonlocal said
        if result.tokens - said >= 5000:
            said = result.tokens
            print(f"{said} tokens, {result.num_differing} differing", file=sys.stderr)

    result = fuzzer.run(arguments.tokens, report)
    print(f"{result.tokens} tokens compared, {result.differing_tokens} differ")
    facts = {
        "model": "tiny" if arguments.tiny else arguments.model,
        "backend": f"{target.backend.name}: {target.backend.reason}",
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps({**facts, **dataclasses.asdict(result)}))
    return 1 if result.num_differing else 0


if __name__ == "__main__":
    sys.exit(main())
