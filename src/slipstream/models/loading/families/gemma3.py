"""Gemma 3, the text model (Gemma team 2025, arXiv 2503.19786).

Five layers with a sliding window to one that sees everything, each kind with a RoPE base of its
own; q and k heads normed; norms before and after attention and MLP, stored as w for 1 + w;
embeddings scaled by sqrt(hidden size). GGUF files have the 1 added, and leave most constants out:
llama.cpp has them in code, and so has this.
"""

from __future__ import annotations

import dataclasses
import math

from slipstream.models.arch import Arch, AttentionArch, plain_frequencies, score_scale
from slipstream.models.loading.families.config_arch import (
    FULL,
    SLIDING,
    every,
    num_layers,
    read_attention,
    read_decoder,
    read_layer_types,
)
from slipstream.models.loading.families.family import SANDWICH_LAYER, Family, GgufHeader
from slipstream.models.loading.families.gguf_arch import (
    num_blocks,
    read_gguf_attention,
    read_gguf_decoder,
)
from slipstream.models.loading.keys import MAX_CONTEXT, MAX_LAYERS, Keys
from slipstream.models.loading.rope import of_kind, read_frequencies

_PERIOD = 6  # layers from one that sees everything to the next
_THETA, _LOCAL_THETA = 1e6, 1e4
_SCALE_BY_HIDDEN = 62  # layers of the 27B, whose scores are scaled by its hidden size per head
# What configurations of models that also see leave out.
_DEFAULTS = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def _describe(keys: Keys) -> Arch:
    keys.fill(_DEFAULTS)
    keys.must("use_bidirectional_attention", False)
    keys.must("attention_bias", False)
    keys.must("attn_logit_softcapping", 0)
    keys.must("hidden_act", "gelu_pytorch_tanh")
    own_period = keys.integer("_sliding_window_pattern", 1, MAX_LAYERS, _PERIOD)
    period = keys.integer("sliding_window_pattern", 1, MAX_LAYERS, own_period)
    head_dim = keys.width("head_dim")
    full = read_attention(
        keys,
        frequencies=_frequencies(keys, FULL, head_dim),
        scale=1 / math.sqrt(keys.number("query_pre_attn_scalar")),
        qk_norm=True,
    )
    sliding = dataclasses.replace(
        full,
        frequencies=_frequencies(keys, SLIDING, head_dim),
        window=keys.integer("sliding_window", 1, MAX_CONTEXT),
    )
    types = read_layer_types(keys, every(period, num_layers(keys)))
    return read_decoder(
        keys,
        "gemma3",
        [sliding if kind == SLIDING else full for kind in types],
        activation_key="hidden_activation",
        tied=True,
        embedding_scale=math.sqrt(keys.width("hidden_size")),
        post_norms=True,
        logit_softcap=keys.cap("final_logit_softcapping"),
    )


def _frequencies(keys: Keys, kind: str, head_dim: int) -> tuple[float, ...]:
    """Read both spellings: a block for each kind of layer, or a base for each."""
    theta = keys.number("rope_theta", _THETA, low=1)
    local = keys.number("rope_local_base_freq", _LOCAL_THETA, low=1)
    scaling = keys.block("rope_scaling")  # of the layers that see everything
    if "rope_parameters" in keys:
        block = of_kind(keys.block("rope_parameters"), kind, (FULL, SLIDING))
        return read_frequencies(block, head_dim, theta if kind == FULL else local)
    if kind == FULL:
        return read_frequencies(scaling, head_dim, theta)
    return plain_frequencies(head_dim, local)


def _describe_gguf(header: GgufHeader) -> Arch:
    keys = header.keys
    count, hidden = num_blocks(keys), keys.width("embedding_length")
    full = read_gguf_attention(header, qk_norm=True)
    if count == _SCALE_BY_HIDDEN:
        full = dataclasses.replace(full, scale=score_scale(hidden // full.num_heads))
    local = keys.number("rope.freq_base_swa", _LOCAL_THETA, low=1)
    window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    period = keys.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, _PERIOD)

    def layer(kind: str) -> AttentionArch:
        if kind == FULL or not window:
            return full
        frequencies = plain_frequencies(full.head_dim, local)
        return dataclasses.replace(full, frequencies=frequencies, window=window)

    return read_gguf_decoder(
        header,
        "gemma3",
        map(layer, every(period, count)),
        activation="gelu_tanh",
        embedding_scale=math.sqrt(hidden),
        post_norms=True,
        logit_softcap=keys.cap("final_logit_softcapping"),
    )


GEMMA3 = Family(
    model_types=("gemma3_text", "gemma3"),
    describe=_describe,
    layer_names=SANDWICH_LAYER,
    norm_shift=1.0,
    gguf="gemma3",
    describe_gguf=_describe_gguf,
)
