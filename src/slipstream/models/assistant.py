"""The assistant's draft, written once for every back end: a small head on its target's own KV.

A head owns no KV. Once a round it reads features, the target's residual streams at the row that
chose the anchor; then each draft step embeds the last token, attends query-only to layers of the
*target's* KV before the anchor, picks a token from a vocabulary of its own, and hands its state to
the next step. What was never written cannot be stale: a head may pause for any number of rounds.

Multi-token prediction from a target's hidden states is that of EAGLE (Li et al. 2024, arXiv
2401.15077); attending to the target's KV instead of keeping one's own is what the assistants of
Gemma 4 do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.kernels.ops import (
    Backend,
    Clusters,
    DraftOps,
    HeadNorms,
    Int32,
    KVCache,
    Value,
    Weight,
)
from slipstream.models.decoder import DecoderWeights, add_to_residual
from slipstream.models.head import HeadArch, HeadCheckpoint


@dataclass(frozen=True, kw_only=True)
class Normed:
    """A matrix and the norm of its input, repacked; what is absent leaves its input as it is."""

    norm: Weight | None
    weight: Weight | None


@dataclass(frozen=True, kw_only=True)
class AssistantLayer:
    """One layer, repacked; gate and up are fused along the outputs."""

    q: Normed
    q_norms: HeadNorms | None
    attn_out: Weight
    post_attn_norm: Weight | None
    gate_up: Normed
    down: Weight
    post_ffn_norm: Weight | None


@dataclass(frozen=True, kw_only=True)
class AssistantWeights:
    """A whole head, repacked by one back end.

    Attributes:
        embedding: the target's own.
        token_ids: int32 of shape (W,), the target's id of each token that the head knows; those of
            a cluster follow one another, so that a back end can look at no others.
        post: None hands the residual stream itself to the next step.
    """

    features: tuple[Normed, ...]
    embedding: Weight
    embed: Normed
    state: Normed
    layers: tuple[AssistantLayer, ...]
    norm: Weight
    output: Weight
    post: Weight | None
    token_ids: Int32
    clusters: Clusters | None


def pack_assistant(
    backend: Backend, assistant: HeadCheckpoint, target: DecoderWeights
) -> AssistantWeights:
    """Repack a checkpoint's tensors, in their order of use.

    Args:
        target: the target's weights, on the same back end.
    """
    head, tensors = assistant.head, assistant.tensors

    def vector(name: str) -> Weight | None:
        return backend.vector(tensors[name]) if name in tensors else None

    def matrix(*names: str) -> Weight | None:
        return backend.matrix([tensors[name] for name in names]) if names[0] in tensors else None

    def layer(prefix: str) -> AssistantLayer:
        q_norm = vector(f"{prefix}.q_norm")
        q_norms = None if q_norm is None else HeadNorms(q=q_norm, k=None, eps=head.norm_eps)
        return AssistantLayer(
            q=Normed(norm=vector(f"{prefix}.attn_norm"), weight=matrix(f"{prefix}.q")),
            q_norms=q_norms,
            attn_out=matrix(f"{prefix}.attn_out"),
            post_attn_norm=vector(f"{prefix}.post_attn_norm"),
            gate_up=Normed(
                norm=vector(f"{prefix}.ffn_norm"), weight=matrix(f"{prefix}.gate", f"{prefix}.up")
            ),
            down=matrix(f"{prefix}.down"),
            post_ffn_norm=vector(f"{prefix}.post_ffn_norm"),
        )

    def normed(name: str, absent: Weight | None = None) -> Normed:
        norm = vector(f"{name}.norm")
        return Normed(norm=absent if norm is None else norm, weight=matrix(f"{name}.weight"))

    order = _by_cluster(assistant)
    return AssistantWeights(
        features=tuple(
            normed(f"features.{i}", target.norm) for i in range(len(head.feature_layers))
        ),
        embedding=target.embedding,
        embed=normed("embed"),
        state=normed("state"),
        layers=tuple(layer(f"layers.{n}") for n in range(len(head.kv_layers))),
        norm=vector("norm"),
        post=matrix("post"),
        output=matrix("output")
        if order is None
        else backend.matrix([tensors["output"].take(order)]),
        token_ids=assistant.vocab_map if order is None else assistant.vocab_map[order],
        clusters=_clusters(backend, assistant, order),
    )


def _by_cluster(assistant: HeadCheckpoint) -> Int32 | None:
    """Return an order of the draft vocabulary in which its clusters follow one another."""
    if assistant.clusters is None:
        return None
    return np.argsort(assistant.clusters.members, kind="stable").astype(np.int32)


def _clusters(backend: Backend, assistant: HeadCheckpoint, order: Int32 | None) -> Clusters | None:
    if assistant.clusters is None:
        return None
    return Clusters(
        centroids=backend.matrix([assistant.tensors["centroids"]]),
        members=assistant.clusters.members[order],
        top=assistant.clusters.top,
    )


def draft(ops: DraftOps, head: HeadArch, weights: AssistantWeights, kv: KVCache, k: int) -> None:
    """Draft k tokens for every row."""
    kept_layers = sorted(set(head.feature_layers))
    state = None
    for after, feature in zip(head.feature_layers, weights.features, strict=True):
        state = _project(ops, head, ops.kept(kept_layers.index(after)), feature, state)
    for _ in range(k):
        state = _draft_one(ops, head, weights, kv, state)


def _draft_one(
    ops: DraftOps, head: HeadArch, weights: AssistantWeights, kv: KVCache, state: Value
) -> Value:
    """Pick one token for every row and return the state that the next one starts from."""
    x = _project(ops, head, ops.embed(weights.embedding, head.embedding_scale), weights.embed)
    x = _project(ops, head, state, weights.state, x)
    shapes = zip(head.kv_layers, head.num_heads, head.windows, head.scales, strict=True)
    for (index, heads, window, scale), layer in zip(shapes, weights.layers, strict=True):
        q = _project(ops, head, x, layer.q)
        q = ops.rope(q, kv.layer(index), heads, layer.q_norms, advance=head.advances)
        attended = ops.attention(q, kv.layer(index), heads, window)
        del q
        x = add_to_residual(
            ops, x, attended, layer.attn_out, layer.post_attn_norm, eps=head.norm_eps
        )
        del attended
        gated = ops.gated(_project(ops, head, x, layer.gate_up), head.activation)
        x = add_to_residual(
            ops, x, gated, layer.down, layer.post_ffn_norm, eps=head.norm_eps, scale=scale
        )
        del gated
    y = ops.rms_norm(x, weights.norm, head.norm_eps)
    state = x if weights.post is None else ops.linear(y, weights.post)
    ops.pick(y, weights.output, weights.token_ids, weights.clusters)
    return state


def _project(
    ops: DraftOps, head: HeadArch, x: Value, normed: Normed, residual: Value | None = None
) -> Value:
    """Return normed.weight . rms(x), plus residual if given."""
    if normed.norm is not None:
        x = ops.rms_norm(x, normed.norm, head.norm_eps)
    return x if normed.weight is None else ops.linear(x, normed.weight, residual=residual)
