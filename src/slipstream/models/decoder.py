"""The forward pass, written once for every family and back end.

It calls the op set of `kernels.ops` and knows nothing of layouts, devices or threads. A new family
changes `Arch` and a loader map; it adds a line here only where its arithmetic is new.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from slipstream.kernels.ops import HeadNorms, KVCache, Ops, SharedOps, Value, Weight
from slipstream.models.arch import Arch


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer, repacked; q, k, v and gate, up are fused along the outputs.

    Attributes:
        qkv: q alone in a layer that attends to another's KV, q and k where k is v.
        qkv_bias: of what `qkv` holds.
        q_norm, k_norm: of each head.
        post_attn_norm, post_ffn_norm: of what is added to the residual stream.
        scale: multiplies the residual stream at the layer's end; needs `post_ffn_norm`.
    """

    attn_norm: Weight
    qkv: Weight
    attn_out: Weight
    ffn_norm: Weight
    gate_up: Weight
    down: Weight
    qkv_bias: Weight | None = None
    q_norm: Weight | None = None
    k_norm: Weight | None = None
    post_attn_norm: Weight | None = None
    post_ffn_norm: Weight | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """A whole decoder, repacked by one back end."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    norm: Weight
    output: Weight


def forward(
    ops: Ops,
    arch: Arch,
    weights: DecoderWeights,
    kv: KVCache,
    *,
    kept_layers: Collection[int] = (),
) -> Value:
    """Run the decoder over the step's rows and return the logits of the wanted ones.

    Args:
        kept_layers: after how many layers, 1 to all, the residual stream is kept for a drafter.
    """
    x = ops.embed(weights.embedding, arch.embedding_scale)
    for index, layer in enumerate(weights.layers):
        attended = ops.attention(_queries(ops, arch, layer, kv, index, x), kv.layer(index))
        x = add_to_residual(
            ops, x, attended, layer.attn_out, layer.post_attn_norm, eps=arch.norm_eps
        )
        del attended  # its buffer serves what follows
        normed = ops.rms_norm(x, layer.ffn_norm, arch.norm_eps)
        gated = ops.gated(ops.linear(normed, layer.gate_up), arch.activation)
        x = add_to_residual(
            ops, x, gated, layer.down, layer.post_ffn_norm, eps=arch.norm_eps, scale=layer.scale
        )
        del gated
        if index + 1 in kept_layers:
            ops.keep(x)
    return ops.logits(
        ops.rms_norm(x, weights.norm, arch.norm_eps), weights.output, arch.logit_softcap
    )


def _queries(ops: Ops, arch: Arch, layer: LayerWeights, kv: KVCache, index: int, x: Value) -> Value:
    """Return a layer's rotated queries; its keys and values go to the pages if it has its own."""
    normed = ops.rms_norm(x, layer.attn_norm, arch.norm_eps)
    qkv = ops.linear(normed, layer.qkv, bias=layer.qkv_bias)
    norms = None
    if layer.q_norm is not None:
        norms = HeadNorms(q=layer.q_norm, k=layer.k_norm, eps=arch.norm_eps)
    if arch.owns_kv(index):
        return ops.rope_append(qkv, kv.layer(index), norms)
    return ops.rope(qkv, kv.layer(index), norms)


def add_to_residual(
    ops: SharedOps,
    residual: Value,
    x: Value,
    weight: Weight,
    norm: Weight | None,
    *,
    eps: float,
    scale: float = 1.0,
) -> Value:
    """Add a product of x to the residual stream, normed first where the family has it so."""
    if norm is None:
        assert scale == 1, "a layer's scale comes with its norm"
        return ops.linear(x, weight, residual=residual)
    return ops.norm_add(residual, ops.linear(x, weight), norm, eps, scale)
