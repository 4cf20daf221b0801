"""What families share in reading a GGUF header (key names: the "LLM" section of its specification).

Frequency factors, a tensor that files with scaled RoPE carry, divide the frequencies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from slipstream.errors import LoadError
from slipstream.models.arch import Arch, AttentionArch, plain_frequencies, score_scale
from slipstream.models.loading.families.config_arch import check_sizes
from slipstream.models.loading.families.family import GgufHeader
from slipstream.models.loading.keys import MAX_CONTEXT, MAX_EPS, MAX_LAYERS, MAX_WIDTH, Keys

_STILL = 1e29  # frequency factors from here on mean that a pair does not turn: files have 1e30
OUTPUT, ROPE_FACTORS = "output.weight", "rope_freqs.weight"
# Names of roles inside a block.
BLOCK = {
    "attn_norm": "attn_norm.weight",
    "attn_out": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "post_ffn_norm": "post_ffw_norm.weight",
    "scale": "layer_output_scale.weight",
    **{part: f"attn_{part}.weight" for part in "qkv"},
    **{f"{part}_bias": f"attn_{part}.bias" for part in "qkv"},
    **{f"{part}_norm": f"attn_{part}_norm.weight" for part in "qk"},
}


def read_gguf_decoder(
    header: GgufHeader, family: str, attention: Iterable[AttentionArch], **changes: Any
) -> Arch:
    """Return the decoder of a header, whose layers' attention is known.

    Args:
        changes: fields of `Arch` that are not as in a llama.
    """
    keys, layers = header.keys, tuple(attention)
    fields: dict[str, Any] = {
        "family": family,
        "num_layers": len(layers),
        "hidden_size": keys.width("embedding_length"),
        "ffn_size": keys.width("feed_forward_length"),
        "vocab_size": header.vocab_size,
        "context_len": keys.integer("context_length", 1, MAX_CONTEXT),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon", high=MAX_EPS),
        "tied_embedding": not header.has(OUTPUT),
        "attention": layers,
        "kv_layers": tuple(range(len(layers))),
    }
    return Arch(**(fields | changes))


def read_gguf_attention(header: GgufHeader, **changes: Any) -> AttentionArch:
    """Return the one kind of attention that a header describes.

    Args:
        changes: fields of `AttentionArch` that are not as in a llama.
    """
    keys = header.keys
    heads = keys.width("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", 1, heads, heads)
    head_dim = read_head_dim(keys, heads)
    fields: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "frequencies": read_gguf_frequencies(header, head_dim),
        "rope_interleaved": False,
        "scale": score_scale(head_dim),
    }
    if heads % kv_heads:
        raise LoadError(
            f"head_count must be a multiple of head_count_kv, got {heads} and {kv_heads}"
        )
    return AttentionArch(**(fields | changes))


def read_head_dim(keys: Keys, heads: int) -> int:
    """Return the width of a head; q, k, v and the rotated part must agree on it."""
    hidden = keys.width("embedding_length")
    if "attention.key_length" not in keys and hidden % heads:
        raise LoadError(
            f"embedding_length must be a multiple of head_count, got {hidden} and {heads}"
        )
    head_dim = keys.integer("attention.key_length", 2, MAX_WIDTH, hidden // heads)
    check_sizes(1, 1, head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        must_equal(keys, key, head_dim)
    return head_dim


def must_equal(keys: Keys, key: str, head_dim: int) -> None:
    """Refuse a width that is not that of a head."""
    value = keys.integer(key, 0, MAX_WIDTH, head_dim)
    if value != head_dim:
        raise LoadError(f"{key} must equal the width of a head, {head_dim}, got {value}")


def read_gguf_frequencies(header: GgufHeader, head_dim: int) -> tuple[float, ...]:
    """Return the frequencies of layers that see everything."""
    keys = header.keys
    frequencies = plain_frequencies(head_dim, keys.number("rope.freq_base", 10000.0, low=1))
    kind = keys.text("rope.scaling.type", "none")
    if kind not in ("none", "", "linear"):
        raise LoadError(f"rope.scaling.type must be none or linear, got {kind!r}")
    if kind == "linear":
        factor = keys.number("rope.scaling.factor", low=1)
        frequencies = tuple(frequency / factor for frequency in frequencies)
    if header.has(ROPE_FACTORS):
        factors = header.numbers(ROPE_FACTORS)
        if factors.shape != (head_dim // 2,) or not (factors > 0).all():
            raise LoadError(
                f"tensor {ROPE_FACTORS} must have shape [{head_dim // 2}] and be above 0, "
                f"got {list(factors.shape)}"
            )
        divided = np.array(frequencies) / factors.astype(np.float64)
        frequencies = tuple(np.where(factors >= _STILL, 0.0, divided).tolist())
    return frequencies


def num_blocks(keys: Keys) -> int:
    """Return the number of layers."""
    return keys.integer("block_count", 1, MAX_LAYERS)
