"""Noise is Philox, keyed by what it says and by nothing else, and Gumbel distributed."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.kernels.noise import NoiseKey, gumbel, noise_bits, philox

KEY = NoiseKey(seed=2**63 + 12345, choice=1, position=77)

# Known answers of the Random123 distribution for philox4x32 with ten rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox(tuple(np.array([word], np.uint32) for word in counter), key)  # type: ignore[arg-type]
    assert tuple(words[:, 0].tolist()) == expected


def test_a_token_is_a_word_of_its_own_counter() -> None:
    bits = noise_bits(KEY, 10)
    counter = (np.array([word], np.uint32) for word in (2, KEY.position, KEY.choice, 0))
    words = philox(tuple(counter), (KEY.seed & 0xFFFFFFFF, KEY.seed >> 32))  # type: ignore[arg-type]
    assert bits[8:].tolist() == words[:2, 0].tolist()


def test_noise_knows_neither_the_vocabulary_nor_earlier_calls() -> None:
    whole = noise_bits(KEY, 1000)
    for size in (1, 3, 4, 999):
        assert noise_bits(KEY, size).tolist() == whole[:size].tolist()


@pytest.mark.parametrize(
    "other",
    [
        NoiseKey(seed=KEY.seed + 1, choice=1, position=77),
        NoiseKey(seed=KEY.seed ^ 1 << 40, choice=1, position=77),
        NoiseKey(seed=KEY.seed, choice=0, position=77),
        NoiseKey(seed=KEY.seed, choice=1, position=78),
    ],
)
def test_every_part_of_the_key_counts(other: NoiseKey) -> None:
    assert (noise_bits(KEY, 1000) != noise_bits(other, 1000)).all()
    assert (noise_bits(KEY, 1000) != noise_bits(KEY, 1000, domain=1)).all()


def test_bits_are_uniform_over_tokens_and_over_positions() -> None:
    over_tokens = noise_bits(KEY, 1 << 16)
    over_positions = [noise_bits(NoiseKey(seed=3, choice=0, position=p), 4) for p in range(1 << 14)]
    for bits in (over_tokens, np.array(over_positions).reshape(-1)):
        counts = np.bincount(bits >> np.uint32(24), minlength=256)
        expected = len(bits) / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert 170 < chi_square < 350  # 255 degrees of freedom: p of either end about 1e-5


def test_gumbel_is_precise_where_it_decides() -> None:
    low = np.arange(1000, dtype=np.uint32)
    steps = np.geomspace(1000, 2**32 - 300, 5000).astype(np.uint32)
    bits = np.unique(np.concatenate([low, steps]))
    w = (bits.astype(np.float64) + 0.5) / 2**32
    exact = -np.log(-np.log1p(-w))
    # The lower end sees w rounded to a float.
    tolerance = np.where(w < 0.9, 4e-7 * np.maximum(np.abs(exact), 1), 2e-2)
    assert (np.abs(gumbel(bits) - exact) <= tolerance).all()


def test_gumbel_is_finite_and_bounded_at_the_ends() -> None:
    ends = gumbel(np.array([0, 1, 2**31, 2**32 - 1], np.uint32))
    assert ends[0] == ends.max() == pytest.approx(33 * np.log(2), rel=1e-6)
    assert ends[3] == ends.min() == pytest.approx(-2.81, abs=0.01)


def test_gumbel_moments() -> None:
    sample = gumbel(noise_bits(KEY, 1 << 18)).astype(np.float64)
    assert sample.mean() == pytest.approx(0.5772, abs=0.01)
    assert sample.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
