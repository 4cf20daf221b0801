"""Gemma 4, the text model of the dense checkpoints (12B, 31B).

As Gemma 3, with layers that see everything having heads of their own size and number, of which a
part of the pairs turns; q, k and v normed and scores not scaled; keys that are also values in those
layers; upper layers that attend to the KV of the last layer of their kind below; a scale at each
layer's end. Norm weights are stored as they are.

Source: `Gemma4TextConfig` and `Gemma4UnifiedTextConfig` of transformers 5. Not here: per-layer
inputs (E2B, E4B) and experts (26B), which are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from slipstream.errors import LoadError
from slipstream.models.arch import Arch, AttentionArch, plain_frequencies
from slipstream.models.loading.families.config_arch import (
    FULL,
    SLIDING,
    every,
    make_attention,
    num_layers,
    read_decoder,
    read_layer_types,
)
from slipstream.models.loading.families.family import SANDWICH_LAYER, Family, GgufHeader
from slipstream.models.loading.families.gguf_arch import (
    BLOCK,
    must_equal,
    num_blocks,
    read_gguf_decoder,
    read_gguf_frequencies,
)
from slipstream.models.loading.keys import MAX_CONTEXT, MAX_WIDTH, Keys
from slipstream.models.loading.rope import of_kind, read_frequencies

_PERIOD = 6  # layers from one that sees everything to the next, where they are not listed
_LOCAL_THETA = 1e4
_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": _LOCAL_THETA},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
_OF_FULL_LAYERS = 512  # their head size, where it is not said
_COMMON: dict[str, Any] = {"scale": 1.0, "qk_norm": True, "v_norm": True}


def _describe(keys: Keys) -> Arch:
    keys.fill(_DEFAULTS)
    keys.must("use_bidirectional_attention", False, "vision")  # text stays causal
    keys.must("attention_bias", False)
    keys.must("hidden_act", "gelu_pytorch_tanh")
    _refuse_inputs(keys)
    _refuse_experts(keys)
    types = read_layer_types(keys, every(_PERIOD, num_layers(keys)))
    shared = keys.integer("num_kv_shared_layers", 0, len(types) - 1, 0)
    keys.must("use_double_wide_mlp", False, *((True,) if not shared else ()))
    if types[-1] != FULL:
        raise LoadError(f"the last of layer_types must be {FULL}, got {types[-1]}")
    return read_decoder(
        keys,
        "gemma4",
        _layers(keys, types),
        activation_key="hidden_activation",
        tied=True,
        kv_layers=kv_layers(types, shared),
        embedding_scale=math.sqrt(keys.width("hidden_size")),
        post_norms=True,
        layer_scales=True,
        logit_softcap=keys.cap("final_logit_softcapping"),
    )


def _layers(keys: Keys, types: Sequence[str]) -> list[AttentionArch]:
    """Return the layers' attention; sizes may be listed layer by layer or for full layers."""
    heads, k_is_v = keys.width("num_attention_heads"), keys.flag("attention_k_eq_v", False)
    full_size = keys.width("global_head_dim", _OF_FULL_LAYERS)
    full_heads = keys.width("num_global_key_value_heads", keys.width("num_key_value_heads"))
    own: dict[str, Any] = {"num_key_value_heads": full_heads} if k_is_v else {}
    listed = keys.block("per_layer_config") if "per_layer_config" in keys else None
    ropes = keys.block("rope_parameters")
    made: dict[tuple[str, int, int], AttentionArch] = {}
    layers = []
    for index, kind in enumerate(types):
        block = Keys({"head_dim": full_size, **own} if kind == FULL else {})
        if listed is not None:
            block = listed.block(str(index))
        size = block.width("head_dim", keys.width("head_dim"))
        kv_heads = block.width("num_key_value_heads", keys.width("num_key_value_heads"))
        for key in block.unread():
            raise LoadError(f"per_layer_config.{index}.{key} is not supported")
        if (kind, size, kv_heads) not in made:
            made[kind, size, kv_heads] = make_attention(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=size,
                frequencies=read_frequencies(of_kind(ropes, kind, (FULL, SLIDING)), size),
                window=keys.integer("sliding_window", 1, MAX_CONTEXT) if kind == SLIDING else 0,
                k_is_v=k_is_v and kind == FULL,
                **_COMMON,
            )
        layers.append(made[kind, size, kv_heads])
    return layers


def kv_layers(types: Sequence[str], shared: int) -> tuple[int, ...]:
    """Return the layer whose KV each layer attends to: the upper `shared` ones own none.

    Raises:
        LoadError: no layer of a shared one's kind is below.
    """
    first = len(types) - shared
    last: dict[str, int] = {kind: index for index, kind in enumerate(types[:first])}
    for kind in types[first:]:
        if kind not in last:
            raise LoadError(f"num_kv_shared_layers {shared} leaves no {kind} layer with its own KV")
    return (*range(first), *(last[kind] for kind in types[first:]))


def _refuse_inputs(keys: Keys) -> None:
    # The configurations of E2B and E4B may leave it out, and its default is 256.
    default = 256 if keys.text("model_type", "") == "gemma4_text" else 0
    if width := keys.integer("hidden_size_per_layer_input", 0, MAX_WIDTH, default):
        raise LoadError(
            f"per-layer inputs (Gemma 4 E2B and E4B) are not supported: "
            f"hidden_size_per_layer_input must be 0, got {width}"
        )
    keys.ignore("vocab_size_per_layer_input")


def _refuse_experts(keys: Keys) -> None:
    if keys.flag("enable_moe_block", False):
        raise LoadError(
            "a mixture of experts (Gemma 4 26B) is not supported: enable_moe_block must be False, "
            "got True"
        )
    keys.ignore("num_experts", "top_k_experts", "moe_intermediate_size")


def _describe_gguf(header: GgufHeader) -> Arch:
    keys = header.keys
    count, heads = num_blocks(keys), keys.width("attention.head_count")
    if width := keys.integer("embedding_length_per_layer_input", 0, MAX_WIDTH, 0):
        raise LoadError(f"per-layer inputs (Gemma 4 E2B and E4B) are not supported, got {width}")
    slides = keys.integers("attention.sliding_window_pattern", 0, 1, count)
    kv_heads = keys.integers("attention.head_count_kv", 1, heads, count)
    types = [SLIDING if slide else FULL for slide in slides]
    shared = keys.integer("attention.shared_kv_layers", 0, max(count - 1, 0), 0)
    sizes = {
        FULL: keys.width("attention.key_length"),
        SLIDING: keys.width("attention.key_length_swa"),
    }
    for kind, suffix in ((FULL, ""), (SLIDING, "_swa")):
        must_equal(keys, f"attention.value_length{suffix}", sizes[kind])
        must_equal(keys, f"rope.dimension_count{suffix}", sizes[kind])
    local = keys.number("rope.freq_base_swa", _LOCAL_THETA, low=1)
    frequencies = {
        FULL: read_gguf_frequencies(header, sizes[FULL]),
        SLIDING: plain_frequencies(sizes[SLIDING], local),
    }
    window = keys.integer("attention.sliding_window", 1, MAX_CONTEXT)
    owners = kv_layers(types, shared)

    def layer(index: int) -> AttentionArch:
        kind, owner = types[index], owners[index]
        return make_attention(
            num_heads=heads,
            num_kv_heads=kv_heads[index],
            head_dim=sizes[kind],
            frequencies=frequencies[kind],
            window=window if kind == SLIDING else 0,
            k_is_v=not header.has(f"blk.{owner}.{BLOCK['v']}"),
            **_COMMON,
        )

    return read_gguf_decoder(
        header,
        "gemma4",
        map(layer, range(count)),
        kv_layers=owners,
        activation="gelu_tanh",
        embedding_scale=math.sqrt(keys.width("embedding_length")),
        post_norms=True,
        layer_scales=header.has(f"blk.0.{BLOCK['scale']}"),
        logit_softcap=keys.cap("final_logit_softcapping"),
    )


GEMMA4 = Family(
    model_types=("gemma4_unified_text", "gemma4_unified", "gemma4_text", "gemma4"),
    describe=_describe,
    layer_names=SANDWICH_LAYER,
    gguf="gemma4",
    describe_gguf=_describe_gguf,
)
