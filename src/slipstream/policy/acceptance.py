"""How many drafted tokens the target accepts, position by position.

p_j is the chance that draft j is accepted once drafts 1 to j - 1 were. Each position keeps decayed
counts of its own: a slow pair that decides, a fast pair that notices a change of text and then
replaces the slow one. A position that was never reached is believed to be like the one before it,
and a request starts from what its pairing knows.

A round in which all k drafts were accepted says nothing about draft k + 1 (it is censored), and one
that a stop or a limit cut says nothing about drafts behind the cut (it is truncated).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slipstream.types import MAX_K

# Trials that the slow counts remember: their standard error, 0.03 at most, moves an estimate of S
# by less than what two neighbouring widths differ by on the recorded pairings.
SLOW_TRIALS = 128.0
# Trials of the fast counts: a change of text is noticed within about this many.
FAST_TRIALS = 8.0
# Fast and slow counts disagree beyond chance at this many standard deviations of the fast one.
CHANGE_SIGMAS = 4.0
# Trials that later positions keep when an earlier one has changed: half of a prior's weight.
DOUBTED_TRIALS = 2.0
# Trials that the pairing's word counts in a new request, and a position's in the next one.
PRIOR_TRIALS = 4.0
# What a pairing is believed to accept before anything was seen: the recorded pairings' median.
FIRST_GUESS = 0.6


class Acceptance:
    """Decayed chances of acceptance of one request, or of one pairing.

    Args:
        prior: chances to start from, position 1 first; positions beyond it follow the last one.
        max_k: positions that are kept.
    """

    __slots__ = (
        "_chances",
        "_expected",
        "_fast",
        "_is_fresh",
        "_slow",
        "_survival",
        "_trials",
        "max_k",
        "prior",
    )

    def __init__(self, prior: Sequence[float] = (FIRST_GUESS,), max_k: int = MAX_K) -> None:
        self.max_k = max_k
        self.prior = list(prior)[:max_k]
        self._slow = [0.0] * max_k  # decayed hits
        self._trials = [0.0] * max_k
        self._fast = [-1.0] * max_k  # moving mean of hits, -1 before the first
        self._chances = [0.0] * max_k
        self._survival = [0.0] * max_k
        self._expected = [0.0] * (max_k + 1)
        self._is_fresh = False  # whether these three say what was counted

    @property
    def chances(self) -> list[float]:
        """p_j of each position, from 1."""
        return self._chances if self._is_fresh else self._refresh()._chances

    @property
    def survival(self) -> list[float]:
        """The chance that drafts 1 to j are all accepted, of each position."""
        return self._survival if self._is_fresh else self._refresh()._survival

    @property
    def expected(self) -> list[float]:
        """E[accepted | k], by k from 0."""
        return self._expected if self._is_fresh else self._refresh()._expected

    def observe(self, k: int, accepted: int, emitted: int) -> None:
        """Take in a round of k > 0 drafts.

        Args:
            k: drafts that were verified.
            accepted: length of their accepted prefix.
            emitted: tokens that the request gained; if it is less than accepted + 1 the round was
                cut, and drafts behind the cut are not looked at.

        Example: k = 4, accepted = 2, emitted = 3 is two hits and a miss at position 3; accepted = 4
        is four hits; accepted = 4, emitted = 2 is two hits.
        """
        if emitted <= accepted:
            hits, missed = emitted, False
        else:
            hits, missed = accepted, accepted < k
        for position in range(min(hits, self.max_k)):
            self._count(position, 1.0)
        if missed and hits < self.max_k:
            self._count(hits, 0.0)
        self._is_fresh = False

    def score(self, scores: Iterable[tuple[int, bool]]) -> None:
        """Take in tokens of proposals that were not verified, as (position from 1, hit)."""
        for position, hit in scores:
            if 1 <= position <= self.max_k:
                self._count(position - 1, float(hit))
        self._is_fresh = False

    def trials(self, position: int) -> float:
        """Return how many trials stand behind the chance at a position, from 1."""
        return self._trials[position - 1]

    def optimistic(self) -> list[float]:
        """Return survival as it would be if every chance were one standard error better."""
        alive, out = 1.0, []
        for chance, trials in zip(self.chances, self._trials, strict=True):
            spread = max(chance * (1.0 - chance), 0.02)
            alive *= min(1.0, chance + math.sqrt(spread / (trials + PRIOR_TRIALS)))
            out.append(alive)
        return out

    def state(self) -> list[float]:
        """Return the chances, to be kept and given as the prior of another."""
        return [round(chance, 4) for chance in self.chances]

    def _count(self, position: int, hit: float) -> None:
        """Add one trial, and let the fast counts replace the slow ones where they disagree."""
        keep = 1.0 - 1.0 / SLOW_TRIALS
        slow = self._slow[position] = self._slow[position] * keep + hit
        trials = self._trials[position] = self._trials[position] * keep + 1.0
        before = self._fast[position]
        fast = hit if before < 0.0 else before + (hit - before) / FAST_TRIALS
        self._fast[position] = fast
        if trials <= 2 * FAST_TRIALS:
            return
        chance = (slow + 1.0) / (trials + 2.0)
        # Variance of an exponential mean of n trials is that of one, over 2 n - 1.
        limit = CHANGE_SIGMAS * math.sqrt(chance * (1.0 - chance) / (2.0 * FAST_TRIALS - 1.0))
        if abs(fast - chance) > limit:
            self._slow[position] = fast * FAST_TRIALS
            self._trials[position] = FAST_TRIALS
            self._doubt_beyond(position)

    def _doubt_beyond(self, position: int) -> None:
        """Let later positions follow this one: what is known of them is of another text."""
        self.prior = self.prior[: position + 1]
        for later in range(position + 1, self.max_k):
            if self._trials[later] > DOUBTED_TRIALS:
                self._slow[later] *= DOUBTED_TRIALS / self._trials[later]
                self._trials[later] = DOUBTED_TRIALS

    def _refresh(self) -> Acceptance:
        """Recompute chances, survival and expectation, as late as they are asked for."""
        chances, survival, expected = self._chances, self._survival, self._expected
        known = len(self.prior)
        chance, alive, total = FIRST_GUESS, 1.0, 0.0
        for position in range(self.max_k):
            guess = self.prior[position] if position < known else chance
            trials = self._trials[position]
            chance = (self._slow[position] + PRIOR_TRIALS * guess) / (trials + PRIOR_TRIALS)
            alive *= chance
            total += alive
            chances[position] = chance
            survival[position] = alive
            expected[position + 1] = total
        self._is_fresh = True
        return self


class Acceptances(NamedTuple):
    """Acceptance of what the free drafter offers and of what the paid one drafts."""

    free: Acceptance
    paid: Acceptance

    @classmethod
    def new(cls) -> Acceptances:
        """Return those of a pairing that has seen nothing."""
        return cls(Acceptance(), Acceptance())
