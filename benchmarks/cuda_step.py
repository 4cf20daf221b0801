"""Whole steps of a decoder on a GPU: classic, by rows and kernel, by batch and by context.

The model has an 8B or 12B shape and random weights (shapes.py); a step is everything between the
host's inputs and its argmax, the one synchronisation included. The bound is the bytes that a step
must read, weights and KV, at the bandwidth of a device-to-device copy in the same run.

Every time is the median wall time of steps that each change their inputs, as decoding does.

    python benchmarks/cuda_step.py [--shape 12b] [--quick] [--kernels auto gemv multirow tile]
        [--parts classic batch surface trace engine rows] [--pairs 40] [--trace FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from shapes import SHAPES, RandomModel, random_model, weight_bytes_of_a_step

from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.pages import pages_for
from slipstream.engine.target import Target
from slipstream.kernels.cuda.bandwidth import copy_bandwidth
from slipstream.kernels.ops import Rows, Step
from slipstream.types import SamplingParams

CONTEXT = 256
CONTEXTS = (256, 4096, 32_768)
BATCHES = (1, 2, 4, 8, 16, 32)
ROWS = (*range(1, 17), 24, 32)
TILES = (16, 32, 64, 128)
REPEATS = 21
PARTS = ("classic", "batch", "surface", "trace", "engine", "rows")
RESAMPLES = 2000


def rows_of(num_seqs: int, each: int, context: int, *, shift: int = 0, pad_to: int = 1) -> Rows:
    """Return the rows of `num_seqs` sequences with `each` rows behind a context of their own."""
    pages = pages_for(context + each)
    live = num_seqs * each
    padding = -live % pad_to
    index = np.arange(live, dtype=np.int32)
    filler = np.zeros(padding, np.int32)
    return Rows(
        token_ids=np.concatenate([(7 * index + shift) % 1000, filler]).astype(np.int32),
        positions=np.concatenate([context + index % each, filler - 1]).astype(np.int32),
        sequences=np.concatenate([index // each, filler]).astype(np.int32),
        page_table=np.arange(num_seqs * pages, dtype=np.int32).reshape(num_seqs, pages),
        logit_rows=index,
    )


def time_step(step: Step, num_seqs: int, each: int, context: int, **layout: int) -> float:
    """Return the median seconds of a step."""
    times = []
    for repeat in range(REPEATS + 3):
        rows = rows_of(num_seqs, each, context, shift=repeat, **layout)
        began = time.perf_counter()
        step(rows)
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def classic(target: Target, rate: float) -> dict[str, Any]:
    """Return a classic step's time against its bound, by context."""
    out = {}
    for context in CONTEXTS:
        seconds = time_step(target.step, 1, 1, context)
        read = weight_bytes_of_a_step(target) + target.kv_token_bytes * context
        out[context] = {
            "ms": 1e3 * seconds,
            "bound_ms": 1e3 * read / rate,
            "ratio": seconds * rate / read,
        }
        print(
            f"classic, context {context:6d}: {1e3 * seconds:7.3f} ms, bound "
            f"{1e3 * read / rate:6.3f} ms, {seconds * rate / read:5.2f} times"
        )
    return out


def by_rows(model: RandomModel, kernels: Sequence[str], rows: Sequence[int]) -> dict[str, Any]:
    """Return milliseconds by kernel, padding and rows of one sequence."""
    out: dict[str, Any] = {}
    for kernel in kernels:
        for tile_m in TILES if kernel == "tile" else (16,):
            step = model.step_with(kernel, tile_m)
            for pad in (1, 8) if kernel != "tile" else (tile_m,):
                name = f"{kernel} {tile_m}" if kernel == "tile" else f"{kernel}, pad {pad}"
                times = {n: 1e3 * time_step(step, 1, n, CONTEXT, pad_to=pad) for n in rows}
                out[name] = times
                print(f"{name:16s}", " ".join(f"{n}:{ms:.3f}" for n, ms in times.items()))
            del step
    return out


def by_batch(target: Target, batches: Sequence[int]) -> dict[str, Any]:
    """Return tokens a second by batch, one row a sequence."""
    out = {}
    for batch in batches:
        seconds = time_step(target.step, batch, 1, CONTEXT)
        out[batch] = {"ms": 1e3 * seconds, "tokens_per_s": batch / seconds}
        print(f"batch {batch:3d}: {1e3 * seconds:7.3f} ms, {batch / seconds:8.1f} tokens/s")
    return out


def surface(target: Target, rows: Sequence[int]) -> dict[str, Any]:
    """Return milliseconds by context and rows of one sequence."""
    out = {}
    for context in CONTEXTS:
        out[context] = {n: 1e3 * time_step(target.step, 1, n, context) for n in rows}
        print(f"context {context:6d}:", " ".join(f"{n}:{ms:.3f}" for n, ms in out[context].items()))
    return out


class _Numbers:
    """A tokenizer for prompts of token ids."""

    stop_ids = frozenset[int]()

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        return [ord(c) for c in text]

    def has_more_ids(self, text: str, limit: int) -> int:
        return 0

    def detokenizer(self) -> _Numbers:
        return self

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of second / first over pairs, and its 95 % interval by resampling."""
    ratios = np.array(second) / np.array(first)
    draw = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draw], axis=1), (2.5, 97.5))
    return float(np.median(ratios)), float(low), float(high)


def engines(target: Target, config: EngineConfig, tokens: int, pairs: int) -> dict[str, Any]:
    """Return what an engine makes of k = 0 and of drafts that are sometimes wrong."""
    from slipstream.drafters.scripted import ScriptedDrafter, ScriptedSpec

    prompt = [(37 * i) % 5000 for i in range(CONTEXT)]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)

    def run(make: Any, k: Any) -> tuple[list[int], float]:
        settings = dataclasses.replace(config, k=k, profile="off", prefix_cache="off")
        engine = Engine(target, _Numbers(), config=settings, make_drafters=[make] if make else ())
        began = time.perf_counter()
        (reply,) = engine.generate([prompt], params)
        return reply.token_ids, time.perf_counter() - began

    script = prompt + run(None, "off")[0]
    spec = ScriptedSpec(rates=(0.56, 0.5, 0.45, 0.4, 0.4, 0.4, 0.4, 0.4))

    def scripted() -> Any:
        return ScriptedDrafter([script], spec, vocab_size=target.arch.vocab_size)

    plain: list[float] = []
    zero: list[float] = []
    for pair in range(pairs):  # each first as often: a clock that moves moves both
        for arm in (0, 1) if pair % 2 else (1, 0):
            if arm:
                zero.append(run(scripted, 0)[1])
            else:
                plain.append(run(None, "off")[1])
    ratio, low, high = paired_ratio(plain, zero)
    out: dict[str, Any] = {
        "distinct_tokens": len(set(script[CONTEXT:])),
        "pairs": pairs,
        "k0_over_plain": ratio,
        "k0_over_plain_95": [low, high],
        "differing_tokens": 0,
        "tokens_per_s": {},
    }
    for k in (0, 1, 3, 7, 15):
        ids, seconds = run(scripted, k)
        out["differing_tokens"] += sum(a != b for a, b in zip(ids, script[CONTEXT:], strict=True))
        out["tokens_per_s"][k] = tokens / seconds
    print(f"engine: k = 0 takes {ratio:.4f} ({low:.4f} to {high:.4f}) of a plain engine's time")
    print(f"engine: {out['differing_tokens']} tokens differ, tokens/s {out['tokens_per_s']}")
    return out


def trace(target: Target, path: Path | None) -> dict[str, float]:
    """Return microseconds of each kernel in a classic step."""
    from torch.profiler import ProfilerActivity, profile

    rows = rows_of(1, 1, CONTEXT)
    target.step(rows)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            target.step(rows)
    if path is not None:
        profiler.export_chrome_trace(str(path))
    found = sorted(profiler.key_averages(), key=lambda item: -item.self_device_time_total)
    times = {}
    for item in found[:16]:
        times[item.key[:60]] = item.self_device_time_total / 5
        print(
            f"{item.key[:60]:60s} {item.count / 5:6.1f} launches, "
            f"{item.self_device_time_total / 5:8.1f} us a step"
        )
    return times


def main() -> None:
    """Measure, print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="12b")
    parser.add_argument("--quick", action="store_true", help="fewer rows and batches")
    parser.add_argument("--kernels", nargs="*", default=["auto", "gemv", "multirow", "tile"])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=40, help="of runs with k = 0 and without")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rate = copy_bandwidth()
    print(f"copy bandwidth {rate / 1e12:.2f} TB/s")
    config = EngineConfig(max_num_seqs=32, max_model_len=33_024, kv_tokens=66_048)
    began = time.perf_counter()
    model = random_model(arguments.shape, config)
    target = model.target
    torch.cuda.synchronize()
    print(
        f"{arguments.shape}: {target.backend.weight_bytes() / 1e9:.2f} GB of weights drawn in "
        f"{time.perf_counter() - began:.1f} s"
    )
    rows = (1, 2, 4, 8, 16) if arguments.quick else ROWS
    free = torch.cuda.mem_get_info()[0]
    result = {
        "schema": "slipstream.cuda_step/1",
        "shape": arguments.shape,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "copy_bytes_per_s": rate,
    }
    measures: dict[str, Callable[[], object]] = {
        "classic": lambda: classic(target, rate),
        "batch": lambda: by_batch(target, (1, 8, 32) if arguments.quick else BATCHES),
        "surface": lambda: surface(target, (1, 4, 8, 16) if arguments.quick else ROWS),
        "trace": lambda: trace(target, arguments.trace),
        "engine": lambda: engines(target, config, arguments.tokens, arguments.pairs),
        "rows": lambda: by_rows(model, arguments.kernels, rows),
    }
    result |= {part: measures[part]() for part in PARTS if part in arguments.parts}
    used = free - torch.cuda.mem_get_info()[0]
    print(f"graphs and late allocations took {used / 2**20:.0f} MiB")
    line = json.dumps(result)
    if arguments.json:
        arguments.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
