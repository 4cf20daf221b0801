"""A draft model on real forwards, for a target that is N times as deep and says the same.

The target is the model with layers appended that add nothing to the residual stream (their weights
are zero, and read all the same), so what it costs grows and what it says does not: the model itself
then is a draft model of perfect acceptance. `--wrong` has a share of its drafts changed before they
are verified. Classic decoding, fixed widths and auto run in turn on one loaded pair; every text is
compared.

    python benchmarks/draft_model.py [MODEL] [--deeper 4] [--wrong 0.2] [--tokens 160] [--laps 3]

It shows what the machinery costs and what the policy makes of it. It is no claim about any real
pair of models, whose acceptance is their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from provenance import DEFAULT_MODEL, find_model, provenance

from slipstream.config import EngineConfig
from slipstream.engine.draft_model import DraftSource
from slipstream.engine.engine import Engine
from slipstream.engine.load import choose_backend, learn
from slipstream.engine.pairing import Pairing
from slipstream.engine.target import build_target
from slipstream.kernels.ops import Backend
from slipstream.models.decoder import DecoderWeights, LayerWeights
from slipstream.models.loading import open_model
from slipstream.models.weights import DenseTensor, QuantizedTensor, Tensor
from slipstream.types import SamplingParams

PROMPTS = (
    "Explain how a bicycle stays upright, step by step.",
    "Write a short story about a lighthouse keeper and a storm.",
    "List ten uses of a brick.",
)
WIDTHS = ("off", 2, 4, 8, "auto")


def deeper(file: Any, times: int) -> tuple[Any, Any]:
    """Return the shape of a model with layers that add nothing, and what loads its weights."""
    arch = dataclasses.replace(
        file.arch,
        num_layers=times * file.arch.num_layers,
        attention=times * file.arch.attention,
        kv_layers=tuple(range(times * file.arch.num_layers)),
    )

    def load(backend: Backend) -> DecoderWeights:
        weights = file.load_weights(backend)
        more = [
            _nothing(backend, arch, arch.attention[index])
            for index in range(file.arch.num_layers, arch.num_layers)
        ]
        return dataclasses.replace(weights, layers=(*weights.layers, *more))

    return arch, load


def _nothing(backend: Backend, arch: Any, attention: Any) -> LayerWeights:
    ones = DenseTensor(values=np.ones(arch.hidden_size, np.float32), dtype="f32")

    def zeros(outputs: int, inputs: int) -> Tensor:
        empty = np.zeros((outputs, inputs // 32), np.float16)
        codes = np.zeros((outputs, inputs), np.uint8)
        return QuantizedTensor(bits=4, codes=codes, zero=0, scale=empty, bias=empty)

    hidden, ffn = arch.hidden_size, arch.ffn_size
    width = attention.q_size + 2 * attention.kv_size
    return LayerWeights(
        attn_norm=backend.vector(ones),
        qkv=backend.matrix([zeros(width, hidden)]),
        attn_out=backend.matrix([zeros(hidden, attention.q_size)]),
        ffn_norm=backend.vector(ones),
        gate_up=backend.matrix([zeros(2 * ffn, hidden)]),
        down=backend.matrix([zeros(hidden, ffn)]),
    )


def spoil(head: Any, share: float, vocab_size: int) -> None:
    """Have a share of a head's drafts be wrong, each for itself."""
    propose, draw = head.propose, random.Random(0)

    def spoiled(asks: Sequence[Any]) -> list[list[int]]:
        return [
            [token if draw.random() >= share else (token + 1) % vocab_size for token in tokens]
            for tokens in propose(asks)
        ]

    head.propose = spoiled


def main() -> None:
    """Run the laps and print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--deeper", type=int, default=4)
    parser.add_argument("--wrong", type=float, default=0.2)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    file = open_model(find_model(options.model))
    config = EngineConfig(drafter="x9", profile="off", max_model_len=2048)
    arch, load_target = deeper(file, options.deeper)
    source = DraftSource(arch=file.arch, load_weights=file.load_weights)
    target = build_target(arch, choose_backend(config), load_target, config, draft=source)
    pairing = Pairing.fresh(config, [partial(target.head.drafter, shares=False)])
    learn(pairing, target, config, file.fingerprint)
    engine = Engine(target, file.tokenizer, template=file.template, config=config, pairing=pairing)
    assert pairing.policy is not None
    drafting, step_s = pairing.policy.cost.drafting, pairing.policy.cost.verify.time_s(1, 0) or 0.0
    print(
        f"step {1e3 * step_s:.2f} ms; a drafted token {drafting.times(1)[8] / 8 / step_s:.3f} of "
        f"it, a token read to catch up {drafting.catch_up_s(1) / step_s:.4f}"
    )
    spoil(target.head, options.wrong, arch.vocab_size)
    seconds: dict[Any, float] = dict.fromkeys(WIDTHS, 0.0)
    lengths: dict[Any, list[float]] = {k: [] for k in WIDTHS}
    for lap in range(options.laps):
        for prompt in PROMPTS:
            texts = set()
            for k in WIDTHS[lap % len(WIDTHS) :] + WIDTHS[: lap % len(WIDTHS)]:
                params = SamplingParams(
                    max_tokens=options.tokens,
                    temperature=options.temperature,
                    seed=7,
                    ignore_eos=True,
                    k=k,
                )
                began = time.perf_counter()
                (reply,) = engine.generate([[{"role": "user", "content": prompt}]], params)
                seconds[k] += time.perf_counter() - began
                lengths[k].append(reply.speculation.acceptance_length or 1.0)
                texts.add(tuple(reply.token_ids))
            assert len(texts) == 1, "the text depends on k"
    num_tokens = options.laps * len(PROMPTS) * options.tokens
    rows = {}
    for k in WIDTHS:
        speedup = seconds["off"] / seconds[k]
        mean = sum(lengths[k]) / len(lengths[k])
        rows[str(k)] = {"tokens_per_s": round(num_tokens / seconds[k], 1), "S": round(speedup, 3)}
        print(
            f"k {k!s:>4}: {num_tokens / seconds[k]:7.1f} tok/s, S {speedup:.3f}, length {mean:.2f}"
        )
    print(json.dumps({**vars(options), "rows": rows, "provenance": provenance(file.path)}))


if __name__ == "__main__":
    main()
