"""The definition of a pick, in numpy: what every sampling kernel computes to the last bit.

With l the processed logits, m the largest of them and x = (l - m) / T:

1. A weight is exp(x) rounded to a multiple of 2**-bits, where V * 2**bits <= 2**53: sums over a
   vocabulary are then exact in double and have no order.
2. top-k keeps the k largest l, the lowest id first among equals.
3. top-p goes through what is kept in the order (l descending, id ascending), as far as the token
   with which the sum of weights reaches p times the kept sum.
4. min-p keeps weights >= min_p times the largest weight.
5. The token is the argmax of x + Gumbel noise over what is kept, the lowest id among equals; at
   T = 0 the argmax of l.

NaN is no candidate. A row without a finite largest logit has no token: -1. Temperatures that round
to 0 in float32 are 0.

Used by the reference back end and as the oracle of tests; the compiled twin is kernels/cpu.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from slipstream.kernels.noise import NoiseKey, gumbel, noise_bits
from slipstream.kernels.ops import F32, Int32

Bool = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]

_F = np.float32
_MAX_BITS = 50


def weight_bits(vocab_size: int) -> int:
    """Return the bits of the largest weight: sums over a vocabulary stay below 2**53."""
    return min(_MAX_BITS, 53 - math.ceil(math.log2(vocab_size)))


def exp_unfused(x: F32) -> F32:
    """Return exp(x) for x <= 0, with exp(-60) below.

    Reduction by ln 2 in two parts and a Taylor polynomial of degree 6, error about 2e-7 (Cody and
    Waite 1980), in float32 without fused products.
    """
    clamped = np.maximum(x, _F(-60))
    n: F32 = np.rint(clamped * _F(1.44269504))
    r: F32 = clamped + n * _F(-0.693359375)
    r = r + n * _F(2.12194440e-4)
    p: F32 = np.full_like(r, _F(1) / _F(720))
    for factorial in (120, 24, 6, 2, 1, 1):
        p = p * r + _F(1) / _F(factorial)
    out: F32 = np.ldexp(p, n.astype(np.int32))
    return out


def weigh(x: F32) -> F64:
    """Return weights of scaled logits, whole numbers up to 2**weight_bits."""
    scale = _F(2.0 ** weight_bits(len(x)))
    weights: F64 = np.rint(exp_unfused(x) * scale).astype(np.float64)
    return weights


def processed(logits: F32, ids: Int32, values: F32, allowed: Bool | None) -> F32:
    """Return a copy of a row with some logits replaced and forbidden ones at -inf."""
    row = logits.copy()
    # One by one: of an id that comes twice the last value counts.
    for token_id, value in zip(ids.tolist(), values, strict=True):
        row[token_id] = value
    row[np.isnan(row)] = -np.inf
    if allowed is not None:
        row[~allowed] = -np.inf
    return row


def kept(row: F32, weights: F64, *, top_k: int, top_p: float, min_p: float) -> Bool:
    """Return which ids the filters keep, bool of shape (V,); one at least."""
    order = np.argsort(-row, kind="stable")
    order = order[row[order] > -np.inf]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        sums = np.cumsum(weights[order])
        target = max(math.ceil(top_p * float(sums[-1])), 1)
        order = order[: int(np.searchsorted(sums, target)) + 1]
    out = np.zeros(len(row), np.bool_)
    out[order] = True
    if min_p > 0:
        out &= weights >= float(_F(min_p * 2.0 ** weight_bits(len(row))))
    return out


def pick(
    logits: F32,
    ids: Int32,
    values: F32,
    allowed: Bool | None,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    key: NoiseKey,
) -> int:
    """Return the token that one row gives.

    Args:
        logits: raw, float32 of shape (V,); not written.
        ids: int32 of shape (N,), logits to replace.
        values: float32 of shape (N,), by what; the last of an id counts.
        allowed: bool of shape (V,), or None; False forbids.
        top_k: 0 keeps all.

    Returns:
        The id, or -1 where no logit is finite or one is +inf.
    """
    row = processed(logits, ids, values, allowed)
    largest = row.max()
    if not np.isfinite(largest):
        return -1
    t = _F(temperature)
    if t == 0:
        return int(row.argmax())
    with np.errstate(over="ignore"):
        x = (row - largest) / t
    keep = kept(row, weigh(x), top_k=top_k, top_p=top_p, min_p=min_p)
    scores = np.where(keep, x + gumbel(noise_bits(key, len(row))), _F(-np.inf))
    return int(scores.argmax())


def summarize(logits: F32, num_top: int) -> tuple[float, float, Int32] | None:
    """Return what the log-softmax of a raw row needs.

    Returns:
        The largest logit, the sum of exp(logit - largest), and the ids of the `num_top` largest in
        order of id; None where no logit is finite or one is +inf.
    """
    row = np.where(np.isnan(logits), _F(-np.inf), logits)
    largest = row.max()
    if not np.isfinite(largest):
        return None
    with np.errstate(over="ignore"):
        x = row - largest
    total = float(weigh(x).sum()) / 2.0 ** weight_bits(len(row))
    order = np.argsort(-row, kind="stable")
    order = order[row[order] > -np.inf][:num_top]
    return float(largest), total, np.sort(order).astype(np.int32)
