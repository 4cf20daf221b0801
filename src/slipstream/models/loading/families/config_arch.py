"""What families share in reading a config.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slipstream.errors import LoadError
from slipstream.models.arch import Arch, AttentionArch, score_scale
from slipstream.models.loading.keys import MAX_CONTEXT, MAX_EPS, MAX_LAYERS, Keys
from slipstream.models.loading.rope import read_frequencies

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_decoder(
    keys: Keys,
    family: str,
    attention: Iterable[AttentionArch],
    *,
    activation_key: str = "hidden_act",
    tied: bool = False,
    **changes: Any,
) -> Arch:
    """Return the decoder of a config.json, whose layers' attention is known.

    Args:
        tied: whether the output is the embedding where the configuration says nothing.
        changes: fields of `Arch` that are not as in a llama.
    """
    layers = tuple(attention)
    activation = keys.text(activation_key)
    if activation not in ACTIVATIONS:
        raise LoadError(f"{activation_key} must be {' or '.join(ACTIVATIONS)}, got {activation!r}")
    fields: dict[str, Any] = {
        "family": family,
        "num_layers": len(layers),
        "hidden_size": keys.width("hidden_size"),
        "ffn_size": keys.width("intermediate_size"),
        "vocab_size": keys.integer("vocab_size", 1, 1 << 31),
        "context_len": keys.integer("max_position_embeddings", 1, MAX_CONTEXT),
        "norm_eps": keys.number("rms_norm_eps", 1e-6, high=MAX_EPS),
        "tied_embedding": keys.flag("tie_word_embeddings", tied),
        "attention": layers,
        "kv_layers": tuple(range(len(layers))),
        "activation": ACTIVATIONS[activation],
    }
    return Arch(**(fields | changes))


def read_attention(keys: Keys, **changes: Any) -> AttentionArch:
    """Return the one kind of attention that a config.json describes.

    Args:
        changes: fields of `AttentionArch` that are not as in a llama.
    """
    heads = keys.width("num_attention_heads")
    hidden = keys.width("hidden_size")
    if "head_dim" not in keys and hidden % heads:
        raise LoadError(
            f"hidden_size must be a multiple of num_attention_heads, got {hidden} and {heads}"
        )
    head_dim = keys.width("head_dim", max(hidden // heads, 1))
    if "frequencies" not in changes:
        changes["frequencies"] = read_one_rope(keys, head_dim)
    return make_attention(
        num_heads=heads,
        num_kv_heads=keys.width("num_key_value_heads", heads),
        head_dim=head_dim,
        **changes,
    )


def make_attention(
    *, num_heads: int, num_kv_heads: int, head_dim: int, **changes: Any
) -> AttentionArch:
    """Return an attention of checked sizes.

    Raises:
        LoadError: sizes that no attention has.
    """
    check_sizes(num_heads, num_kv_heads, head_dim)
    plain: dict[str, Any] = {"rope_interleaved": False, "scale": score_scale(head_dim)}
    return AttentionArch(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **(plain | changes)
    )


def check_sizes(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Refuse numbers of heads and a width of them that contradict each other."""
    if head_dim < 2 or head_dim % 2:
        raise LoadError(f"the width of a head must be even and above 0, got {head_dim}")
    if num_heads % num_kv_heads:
        raise LoadError(
            f"the query heads must be a multiple of the KV heads, got {num_heads} "
            f"and {num_kv_heads}"
        )


def read_one_rope(keys: Keys, head_dim: int) -> tuple[float, ...]:
    """Return the frequencies where all layers turn alike; both spellings of the keys are read."""
    keys.must("partial_rotary_factor", 1)
    theta = keys.number("rope_theta", 10000.0, low=1)
    name = "rope_parameters" if "rope_parameters" in keys else "rope_scaling"
    block = keys.block(name)
    if "rope_theta" in keys and block.number("rope_theta", theta) != theta:
        raise LoadError(
            f"rope_theta and {name}.rope_theta must be equal, got {theta:g} and "
            f"{block.number('rope_theta'):g}"
        )
    return read_frequencies(block, head_dim, theta)


def read_layer_types(keys: Keys, default: Sequence[str]) -> tuple[str, ...]:
    """Return whether each layer is FULL or SLIDING.

    Args:
        default: what the layers are where the configuration does not list them.
    """
    types = keys.raw("layer_types")
    types = list(default) if types is None else types
    if not isinstance(types, list) or not all(kind in (FULL, SLIDING) for kind in types):
        raise LoadError(f"layer_types must list {FULL} and {SLIDING} alone, got {types!r:.100}")
    count = num_layers(keys)
    if len(types) != count:
        raise LoadError(f"layer_types must have {count} entries, one a layer, got {len(types)}")
    return tuple(types)


def every(period: int, count: int) -> list[str]:
    """Return layer types of which each `period`-th is full."""
    return [SLIDING if (index + 1) % period else FULL for index in range(count)]


def num_layers(keys: Keys) -> int:
    """Return the number of layers."""
    return keys.integer("num_hidden_layers", 1, MAX_LAYERS)
