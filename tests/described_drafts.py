"""A draft that uses every op of drafts over a described target: norms, windows, biases and all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.kernels.ops import Backend, DraftOps, DraftRows, HeadNorms, Int32, Weight
from slipstream.models.arch import Arch
from slipstream.models.decoder import forward
from slipstream.models.weights import DenseTensor
from tests.descriptions import random_weights
from tests.drafting import DraftingModel
from tests.tiny import quantize

HIDDEN, FFN, MAX_K, MAX_ROWS = 64, 96, 4, 8


def described_drafting(
    backend: Backend, arch: Arch, *, kind: str, num_heads: Sequence[int], num_pages: int = 64
) -> DraftingModel:
    """Compile a described target that keeps its last residual stream, and a head of two layers.

    Args:
        num_heads: query heads of the head's layers, which attend to the target's last two.
    """
    random = np.random.default_rng(7)
    weights = random_weights(backend, arch, kind=kind)
    kv = backend.kv_cache(arch, num_pages, arch.context_len)
    last = arch.num_layers
    step = backend.compile(
        lambda ops: forward(ops, arch, weights, kv, kept_layers=(last,)),
        max_rows=256,
        max_logits=64,
    )

    def matrix(*sizes: int, k: int, gain: float = 1.0) -> Weight:
        values = [
            random.standard_normal((n, k), dtype=np.float32) * np.float32(gain / k**0.5)
            for n in sizes
        ]
        return backend.matrix([quantize(v, kind if k % 32 == 0 else "f32") for v in values])

    def vector(size: int) -> Weight:
        values = random.uniform(0.5, 1.5, size).astype(np.float32)
        return backend.vector(DenseTensor(values=values, dtype="f32"))

    ids: Int32 = np.arange(0, arch.vocab_size, 2, dtype=np.int32)
    eps, features = 1e-6, (vector(arch.hidden_size), matrix(HIDDEN, k=arch.hidden_size))
    embed = vector(arch.hidden_size), matrix(HIDDEN, k=arch.hidden_size), vector(HIDDEN)
    output, norm = matrix(len(ids), k=HIDDEN, gain=3.0), vector(HIDDEN)

    def layer(index: int, heads: int) -> dict[str, Any]:
        size = arch.attention[index].head_dim
        return {
            "kv": kv.layer(index),
            "heads": heads,
            "norms": HeadNorms(q=vector(size), k=None, eps=eps),
            "q": matrix(heads * size, k=HIDDEN, gain=2.0),
            "bias": vector(heads * size),
            "out": matrix(HIDDEN, k=heads * size),
            "gate_up": matrix(FFN, FFN, k=HIDDEN),
            "down": matrix(HIDDEN, k=FFN),
        } | {name: vector(HIDDEN) for name in ("before", "after", "before_mlp", "after_mlp")}

    layers = [layer(last - 2 + i, heads) for i, heads in enumerate(num_heads)]

    def draft(ops: DraftOps) -> None:
        state = ops.linear(ops.rms_norm(ops.kept(0), features[0], eps), features[1])
        for _ in range(MAX_K):
            x = ops.rms_norm(ops.embed(weights.embedding, 8.0), embed[0], eps)
            x = ops.linear(x, embed[1], residual=state, bias=embed[2])
            for own in layers:
                normed = ops.rms_norm(x, own["before"], eps)
                q = ops.linear(normed, own["q"], bias=own["bias"])
                q = ops.rope(q, own["kv"], own["heads"], own["norms"])
                attended = ops.linear(ops.attention(q, own["kv"], own["heads"]), own["out"])
                x = ops.norm_add(x, attended, own["after"], eps)
                normed = ops.rms_norm(x, own["before_mlp"], eps)
                gated = ops.gated(ops.linear(normed, own["gate_up"]), "gelu_tanh")
                x = ops.norm_add(x, ops.linear(gated, own["down"]), own["after_mlp"], eps, 0.75)
            state = x
            ops.pick(ops.rms_norm(x, norm, eps), output, ids)

    drafts = backend.compile_draft(draft, step, max_rows=MAX_ROWS, max_k=MAX_K)
    return DraftingModel(arch, backend, kv, step, drafts)


def drafts_after(
    model: DraftingModel, prompts: Sequence[Sequence[int]], order: Sequence[int], k: int
) -> dict[int, list[int]]:
    """Draft for some of the prompts, in some order, in one call; half of them with noise."""
    table, ends = model.read(prompts)
    rows = DraftRows(
        token_ids=np.array([11 + i for i in order], np.int32),
        positions=np.array([len(prompts[i]) for i in order], np.int32),
        page_table=np.ascontiguousarray(table[list(order)]),
        kept_rows=ends[list(order)],
        k=k,
        temperatures=np.array([0.9 * (i % 2) for i in order], np.float32),
        seeds=np.array([7 * i for i in order], np.uint64),
        choices=np.zeros(len(order), np.uint32),
    )
    return dict(zip(order, model.draft(rows).tolist(), strict=True))
