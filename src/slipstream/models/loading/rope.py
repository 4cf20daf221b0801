"""How fast the pairs of a head turn, as configurations say it: bases and scaling.

Scaling changes frequencies and nothing else, so it is done here once, in float64.
"""

from __future__ import annotations

import math

from slipstream.errors import LoadError
from slipstream.models.arch import plain_frequencies
from slipstream.models.loading.keys import MAX_CONTEXT, Keys

TYPES = ("default", "linear", "llama3", "proportional")


def read_frequencies(rope: Keys, head_dim: int, theta: float | None = None) -> tuple[float, ...]:
    """Return the frequencies that a block of RoPE parameters describes.

    Args:
        rope: a block of `rope_parameters`, or the older `rope_scaling`.
        theta: the base where the block has none.

    Raises:
        LoadError: a kind of scaling that is not supported, or a value that is missing.
    """
    base = rope.number("rope_theta", theta)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in TYPES:
        raise LoadError(f"rope_type must be one of {', '.join(TYPES)}, got {kind!r}")
    plain = plain_frequencies(head_dim, base)
    if kind == "default":
        rope.must("partial_rotary_factor", 1)
        return plain
    if kind == "proportional":
        turning = int(rope.number("partial_rotary_factor", 1.0) * head_dim // 2)
        factor = rope.number("factor", 1.0)
        return tuple(f / factor if i < turning else 0.0 for i, f in enumerate(plain))
    rope.must("partial_rotary_factor", 1)
    factor = rope.number("factor")
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
