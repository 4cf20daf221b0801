"""Gemma 2 (Gemma team 2024, arXiv 2408.00118).

Layers with a sliding window and layers that see everything in turn; soft-caps of scores and of
logits; norms before and after attention and MLP, stored as w for 1 + w; embeddings scaled by
sqrt(hidden size). GGUF files have the 1 added and leave some constants to llama.cpp's code.
"""

from __future__ import annotations

import dataclasses
import math

from slipstream.models.arch import Arch, score_scale
from slipstream.models.loading.families.config_arch import (
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
from slipstream.models.loading.keys import MAX_CONTEXT, Keys

_PERIOD = 2  # every other layer sees everything
_WINDOW, _SCORE_SOFTCAP, _LOGIT_SOFTCAP = 4096, 50.0, 30.0
_SCALE_BY_HIDDEN = 46  # layers of the 27B, whose scores are scaled by its hidden size per head


def _describe(keys: Keys) -> Arch:
    keys.must("use_bidirectional_attention", False)
    keys.must("attention_bias", False)
    keys.must("hidden_act", "gelu_pytorch_tanh")
    full = read_attention(
        keys,
        scale=1 / math.sqrt(keys.number("query_pre_attn_scalar")),
        softcap=keys.cap("attn_logit_softcapping"),
    )
    sliding = dataclasses.replace(full, window=keys.integer("sliding_window", 1, MAX_CONTEXT))
    types = read_layer_types(keys, every(_PERIOD, num_layers(keys)))
    return read_decoder(
        keys,
        "gemma2",
        [sliding if kind == SLIDING else full for kind in types],
        activation_key="hidden_activation",
        tied=True,
        embedding_scale=math.sqrt(keys.width("hidden_size")),
        post_norms=True,
        logit_softcap=keys.cap("final_logit_softcapping"),
    )


def _describe_gguf(header: GgufHeader) -> Arch:
    keys = header.keys
    count, hidden = num_blocks(keys), keys.width("embedding_length")
    full = read_gguf_attention(
        header, softcap=keys.number("attn_logit_softcapping", _SCORE_SOFTCAP)
    )
    if count == _SCALE_BY_HIDDEN:
        full = dataclasses.replace(full, scale=score_scale(hidden // full.num_heads))
    window = keys.integer("attention.sliding_window", 1, MAX_CONTEXT, _WINDOW)
    sliding = dataclasses.replace(full, window=window)
    return read_gguf_decoder(
        header,
        "gemma2",
        [sliding if kind == SLIDING else full for kind in every(_PERIOD, count)],
        activation="gelu_tanh",
        embedding_scale=math.sqrt(hidden),
        post_norms=True,
        logit_softcap=keys.number("final_logit_softcapping", _LOGIT_SOFTCAP),
    )


GEMMA2 = Family(
    model_types=("gemma2",),
    describe=_describe,
    layer_names=SANDWICH_LAYER,
    norm_shift=1.0,
    gguf="gemma2",
    describe_gguf=_describe_gguf,
)
