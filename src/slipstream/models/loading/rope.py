"""How fast the pairs of a head turn, as configurations say it: bases and scaling.

Scaling changes frequencies and nothing else, so it is done here once, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from slipstream.errors import LoadError
from slipstream.models.arch import plain_frequencies
from slipstream.models.loading.keys import MAX_CONTEXT, Keys

TYPES = ("default", "linear", "llama3", "proportional")
_NOTES = ("original_max_position_embeddings", "finetuned")  # without a say in what is computed


def read_frequencies(rope: Keys, head_dim: int, theta: float | None = None) -> tuple[float, ...]:
    """Return the frequencies that a block of RoPE parameters describes.

    Args:
        rope: a block of `rope_parameters`, or the older `rope_scaling`.
        theta: the base where the block has none.

    Raises:
        LoadError: a kind of scaling that is not supported, a value that is missing, or a key that
            the kind does not have.
    """
    base = rope.number("rope_theta", theta, low=1)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in TYPES:
        raise LoadError(f"rope_type must be one of {', '.join(TYPES)}, got {kind!r}")
    frequencies = _scaled(rope, kind, plain_frequencies(head_dim, base))
    rope.ignore(*_NOTES)
    rope.refuse_unread(f"a rope of type {kind}")
    return frequencies


def of_kind(ropes: Keys, kind: str, kinds: Collection[str]) -> Keys:
    """Return the block of one kind of layer among those of all `kinds`, which alone may be there.

    Raises:
        LoadError: something else is there, or the block is no object.
    """
    ropes.ignore(*kinds)
    ropes.refuse_unread(f"parameters of {' and '.join(kinds)}")
    return ropes.block(kind)


def _scaled(rope: Keys, kind: str, plain: tuple[float, ...]) -> tuple[float, ...]:
    """Return the frequencies as a kind of scaling has them."""
    if kind == "proportional":
        turning = int(rope.number("partial_rotary_factor", 1.0, high=1) * len(plain))
        factor = rope.number("factor", 1.0, low=1)
        return tuple(f / factor if i < turning else 0.0 for i, f in enumerate(plain))
    rope.must("partial_rotary_factor", 1)
    if kind == "default":
        rope.must("factor", 1)
        return plain
    factor = rope.number("factor", low=1)
    if kind == "linear":
        return tuple(frequency / factor for frequency in plain)
    return _llama3(rope, plain, factor)


def _llama3(rope: Keys, plain: tuple[float, ...], factor: float) -> tuple[float, ...]:
    """Scale as Llama 3.1 does: slow pairs by the factor, fast ones not, between them in part.

    (Dubey et al. 2024, arXiv 2407.21783, and the configurations of its checkpoints.)
    """
    low = rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
    trained = rope.integer("original_max_position_embeddings", 1, MAX_CONTEXT)
    if high <= low:
        raise LoadError(f"high_freq_factor must be above low_freq_factor, got {high} and {low}")

    def scaled(frequency: float) -> float:
        turns = trained * frequency / (2 * math.pi)  # in the context that it was trained for
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - kept) * frequency / factor + kept * frequency

    return tuple(map(scaled, plain))
