"""The forward pass, written once for every family and back end.

It calls the op set of `kernels.ops` and knows nothing of layouts, devices or threads. A new family
changes `Arch` and a loader map; it adds a line here only where its arithmetic is new.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from slipstream.kernels.ops import KVCache, Ops, Value, Weight
from slipstream.models.arch import Arch


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer, repacked; q, k, v and gate, up are fused along the outputs."""

    attn_norm: Weight
    qkv: Weight
    attn_out: Weight
    ffn_norm: Weight
    gate_up: Weight
    down: Weight


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
    x = ops.embed(weights.embedding)
    for index, layer in enumerate(weights.layers):
        normed = ops.rms_norm(x, layer.attn_norm, arch.norm_eps)
        q = ops.rope_append(ops.linear(normed, layer.qkv), kv.layer(index))
        x = ops.linear(ops.attention(q, kv.layer(index)), layer.attn_out, residual=x)
        normed = ops.rms_norm(x, layer.ffn_norm, arch.norm_eps)
        x = ops.linear(ops.gated(ops.linear(normed, layer.gate_up)), layer.down, residual=x)
        if index + 1 in kept_layers:
            ops.keep(x)
    return ops.logits(ops.rms_norm(x, weights.norm, arch.norm_eps), weights.output)
