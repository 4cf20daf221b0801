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

from slipstream.kernels.ops import Backend, DraftOps, Int32, KVCache, Value, Weight
from slipstream.models.loading.assistant import Assistant, AssistantConfig


@dataclass(frozen=True, kw_only=True)
class Normed:
    """A matrix and the norm of its input, repacked."""

    norm: Weight
    weight: Weight


@dataclass(frozen=True, kw_only=True)
class AssistantLayer:
    """One layer, repacked; gate and up are fused along the outputs."""

    q: Normed
    attn_out: Weight
    gate_up: Normed
    down: Weight


@dataclass(frozen=True, kw_only=True)
class AssistantWeights:
    """A whole head, repacked by one back end.

    Attributes:
        embedding: the target's own.
        token_ids: int32 of shape (W,), the target's id of each token that the head knows.
    """

    features: tuple[Normed, ...]
    embedding: Weight
    embed: Normed
    state: Normed
    layers: tuple[AssistantLayer, ...]
    norm: Weight
    output: Weight
    post: Weight
    token_ids: Int32


def pack_assistant(backend: Backend, assistant: Assistant, embedding: Weight) -> AssistantWeights:
    """Repack a checkpoint's tensors, in their order of use.

    Args:
        embedding: the target's, on the same back end.
    """
    config, tensors = assistant.config, assistant.tensors

    def normed(norm: str, *matrices: str) -> Normed:
        parts = [tensors[name] for name in matrices]
        return Normed(norm=backend.vector(tensors[norm]), weight=backend.matrix(parts))

    def layer(prefix: str) -> AssistantLayer:
        return AssistantLayer(
            q=normed(f"{prefix}.attn_norm", f"{prefix}.q"),
            attn_out=backend.matrix([tensors[f"{prefix}.attn_out"]]),
            gate_up=normed(f"{prefix}.ffn_norm", f"{prefix}.gate", f"{prefix}.up"),
            down=backend.matrix([tensors[f"{prefix}.down"]]),
        )

    features = [f"features.{i}" for i in range(len(config.feature_layers))]
    return AssistantWeights(
        features=tuple(normed(f"{name}.norm", f"{name}.weight") for name in features),
        embedding=embedding,
        embed=normed("embed.norm", "embed.weight"),
        state=normed("state.norm", "state.weight"),
        layers=tuple(layer(f"layers.{n}") for n in range(len(config.kv_layers))),
        norm=backend.vector(tensors["norm"]),
        post=backend.matrix([tensors["post"]]),
        output=backend.matrix([tensors["output"]]),
        token_ids=assistant.vocab_map,
    )


def draft(
    ops: DraftOps, config: AssistantConfig, weights: AssistantWeights, kv: KVCache, k: int
) -> None:
    """Draft k tokens for every row."""
    kept_layers = sorted(set(config.feature_layers))
    state = None
    for after, feature in zip(config.feature_layers, weights.features, strict=True):
        state = _project(ops, config, ops.kept(kept_layers.index(after)), feature, state)
    for _ in range(k):
        state = _draft_one(ops, config, weights, kv, state)


def _draft_one(
    ops: DraftOps,
    config: AssistantConfig,
    weights: AssistantWeights,
    kv: KVCache,
    state: Value,
) -> Value:
    """Pick one token for every row and return the state that the next one starts from."""
    heads = config.num_heads
    x = _project(ops, config, ops.embed(weights.embedding), weights.embed)
    x = _project(ops, config, state, weights.state, x)
    for index, layer in zip(config.kv_layers, weights.layers, strict=True):
        q = ops.rope(_project(ops, config, x, layer.q), kv.layer(index), heads)
        attended = ops.attention(q, kv.layer(index), heads)
        x = ops.linear(attended, layer.attn_out, residual=x)
        x = ops.linear(ops.gated(_project(ops, config, x, layer.gate_up)), layer.down, residual=x)
    y = ops.rms_norm(x, weights.norm, config.target.norm_eps)
    state = ops.linear(y, weights.post)
    ops.pick(y, weights.output, weights.token_ids)
    return state


def _project(
    ops: DraftOps,
    config: AssistantConfig,
    x: Value,
    normed: Normed,
    residual: Value | None = None,
) -> Value:
    """Return normed.weight . rms(x), plus residual if given."""
    return ops.linear(
        ops.rms_norm(x, normed.norm, config.target.norm_eps), normed.weight, residual=residual
    )
