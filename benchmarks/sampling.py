"""How long one row of logits takes to become a token, single-threaded.

Prints the bound first (the row read once at this core's read rate is what no sampler can beat),
then the median microseconds of a pick by row and filter, and one JSON line last. Rows: `peaked`
falls off like a language model's (a head, a bulk some 15 below it), `zipf` by a power of the rank,
`flat` varies by 0.01 and `equal` not at all, the worst case of every filter. Each timing cycles
through many rows of its kind and a seed of its own a call, so that no branch is learned by heart.
`real` are a model's own rows where `--logits` names a .npy file of shape (R, V).

    python benchmarks/sampling.py --isa avx512 --json FILE

Exit code: 0; 1 if a pick differs from the numpy definition; 2 for bad usage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.engine.sampling import PickKernel, Sampler, native_kernel, reference_kernel
from slipstream.kernels.noise import NoiseKey
from slipstream.kernels.ops import F32
from slipstream.types import SamplingParams

NUM_ROWS = 16
FILTERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "T=0.7": {"temperature": 0.7},
    "T=1 top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "T=0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T=1 top-k 40": {"temperature": 1.0, "top_k": 40},
    "T=1 min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "T=0.7 k 40 p 0.9 m 0.05": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
}
NO_IDS, NO_VALUES = np.zeros(0, np.int32), np.zeros(0, np.float32)


def make_rows(vocab_size: int) -> dict[str, list[F32]]:
    """Return rows by kind, float32 of shape (V,)."""
    draw = np.random.default_rng(0)

    def peaked() -> F32:
        row = draw.normal(0, 2.5, vocab_size)
        head = draw.choice(vocab_size, 40, replace=False)
        row[head] = 15 - 1.2 * np.arange(40) ** 0.7 + draw.normal(0, 0.5, 40)
        return row.astype(np.float32)

    def zipf() -> F32:
        row = -1.1 * np.log(draw.permutation(vocab_size) + 1.0) + draw.normal(0, 0.3, vocab_size)
        return row.astype(np.float32)

    kinds: dict[str, Callable[[], F32]] = {
        "peaked": peaked,
        "zipf": zipf,
        "flat": lambda: draw.normal(0, 0.01, vocab_size).astype(np.float32),
        "equal": lambda: np.full(vocab_size, 0.25, np.float32),
    }
    return {name: [make() for _ in range(NUM_ROWS)] for name, make in kinds.items()}


def median_us(call: Callable[[int], object], repeats: int) -> float:
    """Return the median microseconds of `call(i)`, after a warm-up."""
    seconds = []
    for i in range(repeats + NUM_ROWS):
        began = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(seconds[NUM_ROWS:])


def measure(kernel: PickKernel, rows: dict[str, list[F32]], repeats: int) -> dict[str, Any]:
    """Return microseconds by filter and row kind."""
    table: dict[str, Any] = {}
    for name, filters in FILTERS.items():
        sampling = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}

        def pick(i: int, some: list[F32], sampling: dict[str, Any] = sampling) -> int:
            key = NoiseKey(seed=i, choice=0, position=i)
            return kernel.pick(some[i % len(some)], NO_IDS, NO_VALUES, None, **sampling, key=key)

        table[name] = {
            kind: median_us(lambda i, some=some, pick=pick: pick(i, some), repeats)
            for kind, some in rows.items()
        }
    params = SamplingParams(
        temperature=1.0, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5, logprobs=5
    )
    vocab_size = len(next(iter(rows.values()))[0])
    sampler = Sampler(params, vocab_size=vocab_size, seed=1, kernel=kernel)
    ids = np.random.default_rng(1).integers(0, vocab_size, 1000).tolist()
    history = sampler.history(ids)
    table["T=1 p 0.9, penalties, 1000 ids"] = {
        kind: median_us(lambda i, some=some: sampler.pick(some[i % len(some)], history, i), repeats)
        for kind, some in rows.items()
    }
    table["logprobs, 5 alternatives"] = {
        kind: median_us(lambda i, some=some: sampler.logprobs(some[i % len(some)], 7), repeats)
        for kind, some in rows.items()
    }
    return table


def differs(kernel: PickKernel, rows: dict[str, list[F32]]) -> list[str]:
    """Return where the kernel's picks are not the definition's."""
    wrong = []
    for name, filters in FILTERS.items():
        sampling = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
        for kind, some in rows.items():
            for i, row in enumerate(some[:4]):
                key = NoiseKey(seed=i, choice=1, position=i)
                ours, theirs = (
                    k.pick(row, NO_IDS, NO_VALUES, None, **sampling, key=key)
                    for k in (kernel, reference_kernel())
                )
                if ours != theirs:
                    wrong.append(f"{name} {kind} row {i}: {ours}, not {theirs}")
    return wrong


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default="avx512", choices=["avx512", "portable", "numpy"])
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--logits", type=Path, help="a .npy file of shape (R, V)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kernel = reference_kernel() if arguments.isa == "numpy" else native_kernel(arguments.isa)
    rows = make_rows(arguments.vocab_size)
    if arguments.logits:
        rows["real"] = list(np.load(arguments.logits).astype(np.float32))
    some = rows["peaked"]
    bound = median_us(lambda i: some[i % len(some)].max(), arguments.repeats)
    print(f"bound: one read of a row (numpy's max) {bound:.0f} us; {arguments.isa}")
    table = measure(kernel, rows, arguments.repeats)
    print(f"{'us a row':32}" + "".join(f"{kind:>9}" for kind in rows))
    for name, times in table.items():
        print(f"{name:32}" + "".join(f"{times[kind]:9.0f}" for kind in rows))
    wrong = differs(kernel, rows)
    for line in wrong:
        print(line, file=sys.stderr)
    report = {"isa": arguments.isa, "vocab_size": arguments.vocab_size, "bound_us": bound}
    line = json.dumps(report | {"us": table, "mismatches": len(wrong)})
    if arguments.json:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
