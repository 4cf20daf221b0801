"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): a llama whose q, k and v have biases."""

from __future__ import annotations

import dataclasses

from slipstream.models.arch import Arch, AttentionArch
from slipstream.models.loading.families.config_arch import (
    FULL,
    SLIDING,
    num_layers,
    read_attention,
    read_decoder,
    read_layer_types,
)
from slipstream.models.loading.families.family import Family, GgufHeader
from slipstream.models.loading.families.gguf_arch import (
    num_blocks,
    read_gguf_attention,
    read_gguf_decoder,
)
from slipstream.models.loading.keys import MAX_CONTEXT, MAX_LAYERS, Keys


def read_windows(keys: Keys, attention: AttentionArch) -> list[AttentionArch]:
    """Return the layers' attention: with `use_sliding_window`, the upper layers have a window."""
    window = keys.integer("sliding_window", 0, MAX_CONTEXT, 0)
    first = keys.integer("max_window_layers", 0, MAX_LAYERS, 28)
    if not keys.flag("use_sliding_window", False):
        window = 0
    count = num_layers(keys)
    types = [SLIDING if window and index >= first else FULL for index in range(count)]
    sliding = dataclasses.replace(attention, window=window)
    return [sliding if kind == SLIDING else attention for kind in read_layer_types(keys, types)]


def _describe(keys: Keys) -> Arch:
    attention = read_attention(keys, qkv_bias=True)
    return read_decoder(keys, "qwen2", read_windows(keys, attention))


def _describe_gguf(header: GgufHeader) -> Arch:
    attention = read_gguf_attention(header, qkv_bias=True)
    return read_gguf_decoder(header, "qwen2", [attention] * num_blocks(header.keys))


QWEN2 = Family(
    model_types=("qwen2",), describe=_describe, gguf="qwen2", describe_gguf=_describe_gguf
)
