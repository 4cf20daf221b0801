"""Replays a recorded continuation, wrong on purpose at given rates. For tests and benchmarks only.

A trained drafter's acceptance is whatever it is; here it is an input, on real forwards. The scripts
are what the target says without drafting (prompt and classic continuation), so a token copied from
one is accepted and any other is rejected. Place i of a proposal is copied with probability
`rates[i]`: that is its acceptance rate given that the places before it were accepted.

Whether a place is wrong depends on the seed and the token's position alone, not on k, the round or
the order of calls: the draw of a position is compared with the rate of the place that it stands at.
Each draw decides at most one place that counts, since a round goes on behind its first wrong one,
so the counted places are independent.

It has nothing to offer behind the end of a script, for a prompt that no script begins with, or once
the target said something else than the script (a sampled reply): it declines, and never guesses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.types import MAX_K

PREFIX = "scripted:"
_MASK = 2**64 - 1
# Increment and multipliers of SplitMix64 (Steele, Lea, Flood 2014), a counter-based generator.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, kw_only=True)
class ScriptedSpec:
    """How often a scripted drafter is right.

    Attributes:
        rates: acceptance rate of each place, given that the places before were accepted; the last
            one goes for all further places.
        seed: tells runs of equal rates apart.
    """

    rates: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise ConfigError(f"scripted rates must be in [0, 1], at least one, got {self.rates}")
        if not 0 <= self.seed <= _MASK:
            raise ConfigError(f"a scripted drafter's seed must be in [0, 2**64), got {self.seed}")

    @classmethod
    def parse(cls, text: str) -> ScriptedSpec:
        """Read `scripted:RATE[,RATE...][@SEED]`, e.g. "scripted:0.56" or "scripted:0.8,0.6@7".

        Raises:
            ConfigError: it reads otherwise, or a rate is not in [0, 1].
        """
        rates, at, seed = text.removeprefix(PREFIX).partition("@")
        try:
            if not text.startswith(PREFIX):
                raise ValueError
            return cls(
                rates=tuple(float(rate) for rate in rates.split(",")), seed=int(seed) if at else 0
            )
        except ValueError:
            raise ConfigError(
                f"a scripted drafter is {PREFIX}RATE[,RATE...][@SEED], got {text!r}",
                hint=f"e.g. {PREFIX}0.56, or {PREFIX}0.8,0.6,0.4@7",
            ) from None

    def rate(self, place: int) -> float:
        """Return the conditional acceptance rate of a place in the proposal, 0 the first."""
        return self.rates[min(place, len(self.rates) - 1)]

    def acceptance_length(self, k: int) -> float:
        """Return the expected accepted + 1 of a round of k drafts; rate 0.5, k = 2 gives 1.75."""
        return 1 + sum(math.prod(map(self.rate, range(n))) for n in range(1, k + 1))


class ScriptedDrafter:
    """Proposes what one of its scripts says next, wrong at the spec's rates.

    Args:
        scripts: token ids of prompt and continuation; each request follows the first one that its
            tokens are the beginning of.
        spec: how often it is right.
        vocab_size: wrong tokens are below it; at least 2.
        free: whether the engine may ask before the policy decides.
    """

    name = "scripted"
    max_k = MAX_K

    def __init__(
        self,
        scripts: Sequence[Sequence[int]],
        spec: ScriptedSpec,
        *,
        vocab_size: int,
        free: bool = False,
    ) -> None:
        if vocab_size < 2:
            raise ConfigError(f"a wrong token needs a vocabulary of at least 2, got {vocab_size}")
        self.free = free
        self._scripts = scripts
        self._spec = spec
        self._vocab_size = vocab_size
        self._followed: Sequence[int] = ()
        self._num_checked = 0  # tokens of the request that are known to follow the script

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Return at most k tokens that continue the script, or none; see the module."""
        begin = len(token_ids)
        ahead = self._follow(token_ids)[begin : begin + max(k, 0)]
        return [self._draft(token_id, begin + place, place) for place, token_id in enumerate(ahead)]

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Learn nothing."""

    def release(self) -> None:
        """Forget the request; the scripts stay."""
        self._followed, self._num_checked = (), 0

    def _follow(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the script that begins with the request's tokens, empty if none does."""
        known, length = self._num_checked, len(token_ids)
        if known == 0 or length < known:  # a shorter text is another text
            starts = (script for script in self._scripts if _equal(script[:length], token_ids))
            self._followed = next(starts, ())
        elif not _equal(self._followed[known:length], token_ids[known:]):
            self._followed = ()  # the end of the script, or a target that went another way
        self._num_checked = length
        return self._followed

    def _draft(self, token_id: int, position: int, place: int) -> int:
        """Return the script's token, or at the place's error rate another one."""
        bits = _draw(self._spec.seed, position)
        if (bits >> 11) * 2.0**-53 < self._spec.rate(place):
            return token_id
        return (token_id + 1 + bits % (self._vocab_size - 1)) % self._vocab_size


def _equal(left: Sequence[int], right: Sequence[int]) -> bool:
    return list(left) == list(right)


def _draw(seed: int, position: int) -> int:
    """Return 64 bits that depend on seed and position alone."""
    return _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)


def _mix(bits: int) -> int:
    bits &= _MASK
    bits = ((bits ^ (bits >> 30)) * _MIX_1) & _MASK
    bits = ((bits ^ (bits >> 27)) * _MIX_2) & _MASK
    return bits ^ (bits >> 31)
