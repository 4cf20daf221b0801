"""The noise of sampling, keyed by (seed, choice, position, token id) and by nothing else.

A counter-based generator gives every token at every position bits of its own, whatever was drawn
before: with the same seed a draft's row and the classic step's row see the same noise. Philox4x32
with ten rounds (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3",
table 2): counter (token // 4, position, choice, domain), key (seed's lower, higher 32 bits), and
token % 4 names the word.

A word x becomes w = (x + 1/2) / 2**32, e = -log(1 - w) and the Gumbel variable g = -log e. Large g,
which decide, come from small w, where floats are dense; g lies in [-2.8, 22.9].

All of it is float32 in one order of operations, without fused products, so that numpy and the
compiled kernels agree to the last bit; that is also why the logarithm is spelled out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.kernels.ops import F32

U32 = npt.NDArray[np.uint32]

DOMAIN_TOKENS = 0  # the choice of tokens; other uses of one seed take other domains

_FACTORS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF_WORD = np.uint64(32)

_F = np.float32
_ONE, _TWO = _F(1), _F(2)
_CLIP = _F(1 - 2.0**-24)  # the largest float below 1


@dataclass(frozen=True, kw_only=True)
class NoiseKey:
    """What noise depends on besides the token.

    Attributes:
        seed: unsigned 64 bits.
        choice: index among the n replies to one prompt.
        position: index, in the sequence, of the token that is to be chosen.
    """

    seed: int
    choice: int
    position: int


def philox(counter: tuple[U32, U32, U32, U32], key: tuple[int, int]) -> U32:
    """Return the words of some counters, uint32 of shape (4, N).

    Args:
        counter: four words, each of shape (N,) or broadcast to it.
        key: two words.
    """
    c = [word.astype(np.uint64) for word in np.broadcast_arrays(*counter)]
    k = list(key)
    for _ in range(_ROUNDS):
        a, b = _FACTORS[0] * c[0], _FACTORS[1] * c[2]
        c = [
            (b >> _HALF_WORD) ^ c[1] ^ np.uint64(k[0]),
            b & _LOW,
            (a >> _HALF_WORD) ^ c[3] ^ np.uint64(k[1]),
            a & _LOW,
        ]
        k = [(word + step) & 0xFFFFFFFF for word, step in zip(k, _KEY_STEPS, strict=True)]
    return np.array(c, dtype=np.uint32)


def noise_bits(key: NoiseKey, num_tokens: int, *, domain: int = DOMAIN_TOKENS) -> U32:
    """Return the bits of tokens 0 to num_tokens - 1, uint32 of shape (num_tokens,)."""
    blocks = np.arange(-(-num_tokens // 4), dtype=np.uint32)
    words = (np.array([word], np.uint32) for word in (key.position, key.choice, domain))
    bits = philox((blocks, *words), (key.seed & 0xFFFFFFFF, key.seed >> 32))  # type: ignore[arg-type]
    return bits.T.reshape(-1)[:num_tokens]


def gumbel(bits: U32) -> F32:
    """Return what bits become, float32 of the same shape."""
    w = np.minimum((bits.astype(_F) + _F(0.5)) * _F(2.0**-32), _CLIP)
    rest = _ONE - w
    lost = np.where(rest == _ONE, _ONE, _ONE - rest)
    # log1p by way of log, corrected for what 1 - w lost (Kahan).
    e = np.where(rest == _ONE, w, -_log(rest) * (w / lost))
    out: F32 = -_log(e)
    return out


def _log(a: F32) -> F32:
    """Return the natural logarithm of normal positive floats.

    a = m * 2**n with m in [0.7, 1.4]; log m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.18, so
    the term in s**11 is below a float's resolution.
    """
    offset = a.view(np.int32) - np.int32(0x3F333333)  # 0.7
    n = (offset >> np.int32(23)).astype(_F)
    m = ((offset & np.int32(0x7FFFFF)) + np.int32(0x3F333333)).view(_F)
    f = m - _ONE
    s = f / (f + _TWO)
    z = s * s
    p = np.full_like(z, _ONE / _F(9))
    for odd in (7, 5, 3):
        p = p * z + _ONE / _F(odd)
    twice = s + s
    # ln 2 in two parts: a product of the first with an exponent is exact.
    out: F32 = n * _F(0.693359375) + (twice + (twice * z * p - n * _F(2.12194440e-4)))
    return out
