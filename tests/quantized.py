"""Random canonical matrices of every kind that a format may have."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.models.weights import BFloat16, GroupNumbers, QuantizedTensor, TwoLevel

# What formats have, as (bits, zero, group, numbers, bias).
FORMATS: dict[str, dict[str, Any]] = {
    "Q4_0": {"bits": 4, "zero": 8, "group": 32, "numbers": "f16", "bias": False},
    "Q4_1": {"bits": 4, "zero": 0, "group": 32, "numbers": "f16", "bias": True},
    "Q5_0": {"bits": 5, "zero": 16, "group": 32, "numbers": "f16", "bias": False},
    "Q5_1": {"bits": 5, "zero": 0, "group": 32, "numbers": "f16", "bias": True},
    "Q8_0": {"bits": 8, "zero": 128, "group": 32, "numbers": "f16", "bias": False},
    "Q4_K": {"bits": 4, "zero": 0, "group": 32, "numbers": "u8", "bias": True},
    "Q5_K": {"bits": 5, "zero": 0, "group": 32, "numbers": "u8", "bias": True},
    "Q6_K": {"bits": 6, "zero": 32, "group": 16, "numbers": "i8", "bias": False},
}
MLX: dict[str, dict[str, Any]] = {
    f"MLX {bits} bits, groups of {group}, {numbers}": {
        "bits": bits,
        "zero": 0,
        "group": group,
        "numbers": numbers,
        "bias": True,
    }
    for bits in (4, 5, 6, 8)
    for group, numbers in ((32, "bf16"), (64, "f16"), (64, "bf16"), (128, "f32"))
}
REST: dict[str, dict[str, Any]] = {
    "groups of 16 with a bias": {
        "bits": 4, "zero": 0, "group": 16, "numbers": "f16", "bias": True
    },
    "8 bits in groups of 16": {
        "bits": 8, "zero": 100, "group": 16, "numbers": "bf16", "bias": True
    },
    "5 bits in groups of 16": {
        "bits": 5, "zero": 7, "group": 16, "numbers": "f32", "bias": False
    },
    "two levels of wide groups": {
        "bits": 8, "zero": 128, "group": 128, "numbers": "i8", "bias": False
    },
    "two levels, 6 bits, groups of 32": {
        "bits": 6, "zero": 32, "group": 32, "numbers": "i8", "bias": True
    },
}  # fmt: skip
KINDS = FORMATS | MLX | REST


def random_matrix(
    n: int,
    k: int,
    *,
    bits: int,
    zero: int,
    group: int,
    numbers: str,
    bias: bool,
    seed: int = 0,
    gain: float = 1.0,
) -> QuantizedTensor:
    """Draw a matrix whose products with inputs of size 1 have about `gain`'s size.

    Args:
        numbers: "f16", "bf16", "f32", or two levels with a second one of "u8" or "i8".
    """
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (n, k), dtype=np.uint8)
    size = np.float32(gain / (2**bits * 0.29 * k**0.5))
    middle = np.float32(2 ** (bits - 1) - zero)

    def of(factor: np.float32) -> GroupNumbers:
        if numbers in ("u8", "i8"):
            kind = np.uint8 if numbers == "u8" else np.int8
            low, high = (16, 64) if numbers == "u8" else (-128, 128)
            small = random.integers(low, high, (n, k // group)).astype(kind)
            return TwoLevel(
                super=np.full((n, k // 256), factor / 40, np.float16)
                * random.uniform(0.5, 1.5, (n, k // 256)).astype(np.float16),
                small=small,
            )
        values = factor * random.uniform(0.5, 1.5, (n, k // group)).astype(np.float32)
        if numbers == "bf16":
            return BFloat16(bits=(values.view(np.uint32) >> 16).astype(np.uint16))
        return values.astype(np.float16 if numbers == "f16" else np.float32)

    scale, offset = of(size), of(-middle * size) if bias else None
    return QuantizedTensor(bits=bits, codes=codes, zero=zero, scale=scale, bias=offset)
