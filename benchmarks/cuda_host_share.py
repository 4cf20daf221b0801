"""The host's share of a classic step on a GPU: wall time of engine, step and graph, one sequence.

*Engine* is the time from token to token, *step* what of it passes between the host's inputs and its
argmax, *graph* what the device takes for a replay. What is left of the engine beside the step is
Python; what is left of the step beside the graph is copies, launches and the wait.

    python benchmarks/cuda_host_share.py [smollm2-135m] [--tokens 256] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from slipstream.config import EngineConfig
from slipstream.engine.load import load
from slipstream.kernels.ops import Rows
from slipstream.types import SamplingParams

REPLAYS = 50
RUNS = 5
PROMPT = "Explain how a bicycle stays upright, with everything that matters."


class Timed:
    """A step that keeps what each call took, and the last rows."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.times_s: list[float] = []
        self.rows: Rows | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def __call__(self, rows: Rows) -> Any:
        began = time.perf_counter()
        result = self.step(rows)
        self.times_s.append(time.perf_counter() - began)
        self.rows = rows
        return result


def graph_s(step: Any) -> float:
    """Return the seconds that the device takes for the graph of one row."""
    graph = step._graphs[1, 1]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def main() -> None:
    """Measure, print, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for drafter in ("none", "auto"):
        config = EngineConfig(device="cuda", drafter=drafter, profile="off", max_model_len=2048)
        with load(arguments.model, config) as engine:
            timed = Timed(engine.target.step)
            object.__setattr__(engine.target, "step", timed)
            params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
            message = [{"role": "user", "content": PROMPT}]
            engine.generate([message], params)
            walls, steps = [], []
            for _ in range(RUNS):
                timed.times_s.clear()
                began = time.perf_counter()
                (reply,) = engine.generate([message], params)
                walls.append(time.perf_counter() - began)
                steps.append(sum(timed.times_s))
            tokens = len(reply.token_ids)
            at = min(range(RUNS), key=lambda i: walls[i])
            found[drafter] = {
                "tokens": tokens,
                "forwards": len(timed.times_s),
                "tokens_per_s": tokens / walls[at],
                "engine_ms": 1e3 * walls[at] / len(timed.times_s),
                "step_ms": 1e3 * steps[at] / len(timed.times_s),
                "python_share": 1 - steps[at] / walls[at],
            }
            if drafter == "none":
                graph = graph_s(timed.step)
                found[drafter] |= {
                    "graph_ms": 1e3 * graph,
                    "host_share": 1 - graph * len(timed.times_s) / walls[at],
                }
            print(drafter, {name: round(value, 4) for name, value in found[drafter].items()})
    line = json.dumps(
        {
            "schema": "slipstream.cuda_host_share/1",
            "model": arguments.model,
            "device": torch.cuda.get_device_name(),
            "found": found,
        }
    )
    if arguments.json:
        arguments.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
