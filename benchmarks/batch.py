"""Aggregate classic decode of 1, 2, 4 and 8 sequences, and Python's share of a step.

Nothing is drafted: this is what a batch gains by sharing one read of the weights. Each trial fills
an engine with prompts of 128 tokens of ordinary text, lets all of them emit a token, then times 64
steps; batch sizes are interleaved, their order alternates, and medians count. Python's share is the
time of `Engine.step` outside the compiled forward, sampling and detokenizing included.

    python benchmarks/batch.py [MODEL] [--threads 0] [--trials 5] [--json FILE]

Prints the bound first, the table, and one JSON line last. Other work on the machine spoils the
numbers; its load average is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from provenance import DEFAULT_MODEL, find_model, provenance, sample_text

from slipstream.kernels.bandwidth import read_bandwidth

SIZES = (1, 2, 4, 8)
PROMPT, STEPS = 128, 64


class TimedStep:
    """A compiled step that adds up its own time."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self.seconds = 0.0

    def __call__(self, rows: Any) -> Any:
        """Run and time the step."""
        began = time.perf_counter()
        result = self._step(rows)
        self.seconds += time.perf_counter() - began
        return result


@dataclasses.dataclass
class Trial:
    """Seconds of one trial's steps, and of the forwards within them."""

    total_s: float
    forward_s: float


def run_trial(engine: Any, step: TimedStep, prompts: list[list[int]]) -> Trial:
    """Decode STEPS tokens of every prompt at once."""
    from slipstream.types import SamplingParams

    params = SamplingParams(max_tokens=STEPS + 8, ignore_eos=True)
    ids = [engine.submit(prompt, params) for prompt in prompts]
    started: set[int] = set()
    while len(started) < len(ids):
        started |= {output.request_id for output in engine.step()}
    step.seconds = 0.0
    began = time.perf_counter()
    for _ in range(STEPS):
        outputs = engine.step()
    total_s = time.perf_counter() - began
    if len(outputs) != len(ids):
        raise RuntimeError(f"{len(ids)} sequences should run, {len(outputs)} do")
    trial = Trial(total_s, step.seconds)
    for request_id in ids:
        engine.cancel(request_id)
    return trial


def measure(model: Path, threads: int, num_trials: int) -> dict[str, Any]:
    """Return medians by batch size."""
    import slipstream
    from slipstream.engine.engine import Engine

    # One chunk holds all prompts, so that none is far ahead of the others.
    config = slipstream.EngineConfig(
        k="off",
        drafter="none",
        threads=threads,
        max_num_seqs=max(SIZES),
        prefill_chunk=max(SIZES) * PROMPT,
        prefix_cache="off",
        max_model_len=512,
    )
    loaded = slipstream.load(model, config)
    step = TimedStep(loaded.target.step)
    target = dataclasses.replace(loaded.target, step=step)
    engine = Engine(target, loaded.tokenizer, config=config)
    text = engine.tokenizer.encode(sample_text(), parse_special=False)
    prompts = [text[i * PROMPT : (i + 1) * PROMPT] for i in range(max(SIZES))]
    trials: dict[int, list[Trial]] = {size: [] for size in SIZES}
    for number in range(num_trials + 1):
        for size in SIZES if number % 2 else SIZES[::-1]:
            trial = run_trial(engine, step, prompts[:size])
            if number:  # the first round warms caches and memory
                trials[size].append(trial)
    weight_bytes = target.backend.weight_bytes()
    return {
        "backend": f"{target.backend.name}: {target.backend.reason}",
        "threads": getattr(target.backend, "threads", None),
        "weight_bytes": weight_bytes,
        "batches": [_row(size, trials[size]) for size in SIZES],
    }


def _row(size: int, trials: list[Trial]) -> dict[str, Any]:
    rates = [size * STEPS / trial.total_s for trial in trials]
    outside = [trial.total_s - trial.forward_s for trial in trials]
    return {
        "batch": size,
        "tokens_per_s": statistics.median(rates),
        "min_tokens_per_s": min(rates),
        "max_tokens_per_s": max(rates),
        "step_ms": 1e3 * statistics.median(trial.total_s for trial in trials) / STEPS,
        "python_us": 1e6 * statistics.median(outside) / STEPS,
        "python_share": statistics.median(
            out / trial.total_s for out, trial in zip(outside, trials, strict=True)
        ),
    }


def main() -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=0, help="0 takes all cores")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the JSON line there, too")
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    facts = provenance(model)
    bandwidth, reader = read_bandwidth(3)
    result = measure(model, arguments.threads, arguments.trials)
    bound = bandwidth / result["weight_bytes"]
    print(f"machine   {facts['cpu']}, {facts['cores']} cores, load {facts['load_average']}")
    print(
        f"bound     {bandwidth / 1e9:.1f} GB/s ({reader}) over {result['weight_bytes'] / 1e6:.1f}"
    )
    print(f"          MB of weights: {bound:.0f} steps a second, KV not counted")
    print(f"run by    {result['backend']}, {result['threads']} threads, {arguments.trials} trials")
    print("\nbatch   tok/s [min, max]          x one   ms a step   Python us a step   share")
    one = result["batches"][0]["tokens_per_s"]
    for row in result["batches"]:
        rates = (
            f"{row['tokens_per_s']:.1f} "
            f"[{row['min_tokens_per_s']:.1f}, {row['max_tokens_per_s']:.1f}]"
        )
        print(
            f"{row['batch']:>5}   {rates:<24}{row['tokens_per_s'] / one:7.2f}   "
            f"{row['step_ms']:9.2f}   {row['python_us']:16.0f}   {row['python_share']:5.1%}"
        )
    line = json.dumps({"provenance": facts, "bandwidth_bytes_per_s": bandwidth, **result})
    if arguments.json:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
