"""Qwen3 (Yang et al. 2025, arXiv 2505.09388): a llama whose q and k heads are normed."""

from __future__ import annotations

from slipstream.models.arch import Arch
from slipstream.models.loading.families.config_arch import read_attention, read_decoder
from slipstream.models.loading.families.family import Family, GgufHeader
from slipstream.models.loading.families.gguf_arch import (
    num_blocks,
    read_gguf_attention,
    read_gguf_decoder,
)
from slipstream.models.loading.families.qwen2 import read_windows
from slipstream.models.loading.keys import Keys


def _describe(keys: Keys) -> Arch:
    keys.must("attention_bias", False)  # it would give the output projection a bias as well
    attention = read_attention(keys, qk_norm=True)
    return read_decoder(keys, "qwen3", read_windows(keys, attention))


def _describe_gguf(header: GgufHeader) -> Arch:
    attention = read_gguf_attention(header, qk_norm=True)
    return read_gguf_decoder(header, "qwen3", [attention] * num_blocks(header.keys))


QWEN3 = Family(
    model_types=("qwen3",), describe=_describe, gguf="qwen3", describe_gguf=_describe_gguf
)
