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
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

from fuzzer import LIMITS, MAX_LEN, Fuzzer, Result  # noqa: E402

from slipstream.config import EngineConfig  # noqa: E402
from slipstream.engine.check import Tokenizer  # noqa: E402
from slipstream.engine.target import Target  # noqa: E402

if TYPE_CHECKING:
    from fuzz_worlds import World

EPISODES = 4  # of a world


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
