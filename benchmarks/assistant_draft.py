"""What the assistant's drafts take beside a classic step of the same run, by layers and k.

Prints the bound first (bytes that a draft must read from memory once; further steps find them in
the caches), then for each number of layers the median time of drafting k tokens for
one sequence at a context, and its share of the classic step, and one JSON line last.

Method: the assistant that is shipped for the model, and random checkpoints of a given shape, since
time does not depend on what a head has learned.
Draft and forward alternate as in serving: a verify of k + 1 rows, whose weights push the head's out
of the caches, then the draft. Classic steps are timed between them, in the same turns. The time is
that of the head's own call, arrays included, not of the engine's work around it.

    python benchmarks/assistant_draft.py [--layers shipped,2,3,FOLDER] [--k 1,2,4,8] [--context 256]

Exit code: 0; 1 where --bar is given and drafting 4 tokens takes a larger share than that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from provenance import DEFAULT_MODEL, HERE, find_model, provenance

sys.path.insert(0, str(HERE.parent))

from slipstream.config import EngineConfig
from slipstream.drafters.base import Ask
from slipstream.drafters.checkpoints import shipped_assistant
from slipstream.engine.budget import RowBudget
from slipstream.engine.calibrate import Forwards, idle_forwards
from slipstream.engine.load import choose_backend
from slipstream.engine.target import Target, build_target
from slipstream.kernels.bandwidth import bandwidth_of
from slipstream.models.loading import ModelFile, open_model
from slipstream.models.loading.assistant import Assistant, read_assistant
from tests.assistants import write_random_assistant

SHAPE = {"hidden_size": 576, "ffn_size": 1536, "draft_vocab_size": 8192}
K_OF_BAR = 4
SHIPPED = "shipped"


def main() -> int:
    """Time every shape, print the table, and return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--layers", default="shipped,2,3", help="shipped, layers, folders")
    parser.add_argument("--k", default="1,2,4,8", help="numbers of drafted tokens")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--bar", type=float, help="largest share of a classic step at k = 4")
    args = parser.parse_args()
    file = open_model(find_model(args.model))
    widths = [int(k) for k in args.k.split(",")]
    rows = []
    for layers in args.layers.split(","):
        target = _target(file, layers, args.threads, args.context)
        rows += _timed(target, layers, widths, args.context, args.turns, args.temperature)
    shares = {row["layers"]: row["share"] for row in rows if row["k"] == K_OF_BAR}
    print(
        json.dumps(
            {
                "provenance": provenance(find_model(args.model)),
                "context": args.context,
                "rows": rows,
            }
        )
    )
    return int(args.bar is not None and any(share > args.bar for share in shares.values()))


def _target(file: ModelFile, layers: str, threads: int, context: int) -> Target:
    """Return the model with its shipped assistant, or a random one of so many layers."""
    config = EngineConfig(threads=threads, max_num_seqs=1, max_model_len=context + 256)
    if layers == SHIPPED:
        folder = shipped_assistant(file.fingerprint)
        if folder is None:
            sys.exit("no assistant is shipped for this model")
        assistant = read_assistant(folder, file.arch, file.fingerprint)
    elif layers.isdigit():
        assistant = _random_assistant(file, int(layers))
    else:
        assistant = read_assistant(layers, file.arch, file.fingerprint)
    return build_target(
        file.arch, choose_backend(config), file.load_weights, config, assistant=assistant
    )


def _random_assistant(file: ModelFile, layers: int) -> Assistant:
    num = file.arch.num_layers
    kv_layers = tuple(int(at) for at in np.linspace(num * 2 // 3, num - 1, layers))
    features = (num // 3, num * 2 // 3, num)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        path = write_random_assistant(
            Path(folder),
            file.arch,
            file.fingerprint,
            feature_layers=features,
            kv_layers=kv_layers,
            **SHAPE,
        )
        return read_assistant(path, file.arch, file.fingerprint)


def _timed(
    target: Target, layers: str, widths: list[int], context: int, turns: int, temperature: float
) -> list[dict[str, Any]]:
    """Return one row for each k, printed as they come."""
    bandwidth, _ = bandwidth_of(target.backend, 3)
    budget = RowBudget.of(EngineConfig(max_num_seqs=1), target.arch.vocab_size)
    classic: list[float] = []
    drafts: dict[int, list[float]] = {k: [] for k in widths}
    assert target.head is not None, "the target has a head"
    drafter = target.head.drafter()
    with idle_forwards(target, budget, max(widths) + 2, context) as forwards:
        forwards.fill(budget.prefill)
        for turn in range(turns + 5):
            for k in widths:
                asked = forwards.ask(k, drafter)
                ask = dataclasses.replace(asked, temperature=temperature, seed=turn)
                took = _draft_s(target, ask)
                one = forwards(1)
                if turn >= 5:
                    drafts[k].append(took)
                    classic.append(one)
        _check_batch(forwards, target)
    classic_s = statistics.median(classic)
    bound_s = target.head_bytes / bandwidth
    print(
        f"{layers} layers: {target.head_bytes / 1e6:.1f} MB at {bandwidth / 1e9:.1f} GB/s are "
        f"{1e6 * bound_s:.0f} us; a classic step takes {1e6 * classic_s:.0f} us"
    )
    best_s = min(classic)
    print("   k   draft us   a token us   share of a classic step   best of both: us   share")
    rows = []
    for k, times in drafts.items():
        seconds = statistics.median(times)
        share = seconds / classic_s
        print(
            f"  {k:2}   {1e6 * seconds:8.0f}   {1e6 * seconds / k:10.0f}   {100 * share:21.1f} %   "
            f"{1e6 * min(times):16.0f}   {100 * min(times) / best_s:3.0f} %"
        )
        rows.append(
            {
                "layers": layers,
                "k": k,
                "draft_us": 1e6 * seconds,
                "classic_us": 1e6 * classic_s,
                "share": share,
                "best_draft_us": 1e6 * min(times),
                "best_classic_us": 1e6 * best_s,
                "head_bytes": target.head_bytes,
            }
        )
    return rows


def _draft_s(target: Target, ask: Ask) -> float:
    assert target.head is not None, "the target has a head"
    began = time.perf_counter()
    (drafted,) = target.head.propose([ask])
    took = time.perf_counter() - began
    assert len(drafted) == ask.k, "the head declined"
    return took


def _check_batch(forwards: Forwards, target: Target) -> None:
    """A draft for k tokens begins with the draft for fewer."""
    assert target.head is not None, "the target has a head"
    few, many = (target.head.propose([forwards.ask(k, target.head.drafter())])[0] for k in (2, 4))
    assert many[:2] == few, "a shorter draft differs from a longer one"


if __name__ == "__main__":
    sys.exit(main())
