"""A draft that uses every op of drafts over a described target: norms, windows, biases and all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.kernels.ops import (
    Backend,
    Clusters,
    DraftOps,
    DraftRows,
    HeadNorms,
    Int32,
    Weight,
)
from slipstream.models.arch import Arch
from slipstream.models.decoder import forward
from slipstream.models.weights import DenseTensor
from tests.descriptions import ARCHS, described, random_description, random_weights
from tests.drafting import DraftingModel
from tests.tiny import quantize

HIDDEN, FFN, MAX_K, MAX_ROWS = 64, 96, 4, 8
# Targets, and what `described_drafting` makes of their heads.
CASES: dict[str, tuple[Arch, dict[str, Any]]] = {
    "plain": (described([{}] * 2), {}),
    "windows of the target": (described([{"window": 24}, {"window": 90}]), {}),
    "windows of its own": (described([{}, {"window": 24}]), {"windows": (13, 0)}),
    "windows across splits": (described([{"window": 24}, {}]), {"windows": (200, 1)}),
    "soft-caps": (described([{"softcap": 2.0}, {"softcap": 1.0, "window": 40}]), {}),
    "one position": (described([{"qk_norm": True}] * 2), {"advance": False}),
    "clusters": (described([{}] * 2), {"clusters": (7, 3)}),
    "one cluster": (described([{}] * 2), {"clusters": (5, 1)}),
    "all of it": (
        ARCHS["shared KV"],
        {"windows": (12, 0), "advance": False, "clusters": (300, 40)},
    ),
    "shared KV": (ARCHS["shared KV"], {"num_heads": (8, 3)}),
    "wide heads": (ARCHS["wide heads"], {"num_heads": (1, 2)}),
    **{f"seed {s}": (random_description(s), {"num_heads": (6, 12)}) for s in (1, 5, 6)},
}


def described_drafting(
    backend: Backend,
    arch: Arch,
    *,
    kind: str,
    num_heads: Sequence[int] = (4, 8),
    num_pages: int = 64,
    max_rows: int = 256,
    windows: Sequence[int | None] = (None, None),
    advance: bool = True,
    biased: bool = True,
    clusters: tuple[int, int] | None = None,
) -> DraftingModel:
    """Compile a described target that keeps its last residual stream, and a head of two layers.

    Args:
        num_heads: query heads of the head's layers, which attend to the target's last two.
        windows: of the head's layers.
        advance: whether queries turn with the draft's steps.
        biased: whether a product has both a bias and a residual.
        clusters: how many the vocabulary has, and how many of them are looked into.
    """
    random = np.random.default_rng(7)
    weights = random_weights(backend, arch, kind=kind)
    kv = backend.kv_cache(arch, num_pages, arch.context_len)
    last = arch.num_layers
    step = backend.compile(
        lambda ops: forward(ops, arch, weights, kv, kept_layers=(last,)),
        max_rows=max_rows,
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
    embed = vector(arch.hidden_size), matrix(HIDDEN, k=arch.hidden_size)
    bias = vector(HIDDEN) if biased else None
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

    chosen = None
    if clusters is not None:
        count, top = clusters
        members = random.integers(0, count, len(ids)).astype(np.int32)
        chosen = Clusters(centroids=matrix(count, k=HIDDEN), members=members, top=top)
    layers = [layer(last - 2 + i, heads) for i, heads in enumerate(num_heads)]

    def draft(ops: DraftOps) -> None:
        state = ops.linear(ops.rms_norm(ops.kept(0), features[0], eps), features[1])
        for _ in range(MAX_K):
            x = ops.rms_norm(ops.embed(weights.embedding, 8.0), embed[0], eps)
            x = ops.linear(x, embed[1], residual=state, bias=bias)
            for own, window in zip(layers, windows, strict=True):
                normed = ops.rms_norm(x, own["before"], eps)
                q = ops.linear(normed, own["q"], bias=own["bias"])
                q = ops.rope(q, own["kv"], own["heads"], own["norms"], advance=advance)
                attended = ops.attention(q, own["kv"], own["heads"], window)
                x = ops.norm_add(x, ops.linear(attended, own["out"]), own["after"], eps)
                normed = ops.rms_norm(x, own["before_mlp"], eps)
                gated = ops.gated(ops.linear(normed, own["gate_up"]), "gelu_tanh")
                x = ops.norm_add(x, ops.linear(gated, own["down"]), own["after_mlp"], eps, 0.75)
            state = x
            ops.pick(ops.rms_norm(x, norm, eps), output, ids, chosen)

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
