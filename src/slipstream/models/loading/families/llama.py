"""Llama 2 and 3 (Touvron et al. 2023, arXiv 2307.09288; Dubey et al. 2024, arXiv 2407.21783).

GGUF files of this family store q and k with rows permuted for interleaved pairs.
"""

from __future__ import annotations

from slipstream.models.arch import Arch
from slipstream.models.loading.families.config_arch import (
    num_layers,
    read_attention,
    read_decoder,
)
from slipstream.models.loading.families.family import Family, GgufHeader
from slipstream.models.loading.families.gguf_arch import (
    num_blocks,
    read_gguf_attention,
    read_gguf_decoder,
)
from slipstream.models.loading.keys import Keys


def _describe(keys: Keys) -> Arch:
    keys.must("attention_bias", False)  # it would give the output projection a bias as well
    keys.must("mlp_bias", False)
    return read_decoder(keys, "llama", [read_attention(keys)] * num_layers(keys))


def _describe_gguf(header: GgufHeader) -> Arch:
    attention = read_gguf_attention(header, rope_interleaved=True)
    return read_gguf_decoder(header, "llama", [attention] * num_blocks(header.keys))


LLAMA = Family(
    model_types=("llama",), describe=_describe, gguf="llama", describe_gguf=_describe_gguf
)
