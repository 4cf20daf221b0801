"""What drafting and deciding cost: lookups, the paid drafter, and the policy itself.

Lookups take the same whatever is found and are done before k is chosen. A paid drafter works token
by token, and may draft for several sequences at once for less than it would take for each alone, so
its times are kept by how many drafted together. One with a KV of its own first reads what it has
not seen, the prompt or what came while it paused: that is a part of what drafting costs now, and is
kept by the token. The policy's own time is kept too: an engine that never drafts would not spend
it, so the loss budget pays for it as for everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.policy.base import StepOutcome
from slipstream.policy.level import Level, Mean
from slipstream.types import MAX_K

# A draft may take this much longer than expected: drafters are small, their times spread widely.
WORST_DRAFT = 1.5
# One drafted token of a drafter that was never timed, in classic steps, at worst.
UNTIMED_DRAFT = 0.5
# Tokens that a drafter must have read in a step for its time to say what one takes: what few add
# is less than what drafting itself varies by.
LEAST_READ = 8
# One sample of the policy's own time may add this many times the mean to it: what a first call
# takes says nothing about the next one.
DECISION_JUMP = 1.0
# The first sample of it counts as this at most, in seconds.
FIRST_DECISION_S = 1e-3

NOTHING = [0.0] * (MAX_K + 1)  # what a free drafter's tokens take each, by k


class DraftCost:
    """Seconds of lookups by batch, of drafts by k and sequences, of decisions by batch."""

    def __init__(self) -> None:
        self._peek: Level | None = None  # of one sequence
        self._drafts: dict[int, dict[int, Level]] = {}  # by sequences and k, of one sequence
        self._times: dict[int, list[float]] = {}  # by sequences, as far as they were asked for
        self._reading: Level | None = None  # of one token that a drafter is behind by
        self._has_drafted = False  # a drafter may take no time at all
        self._decisions: dict[int, tuple[Mean, Mean]] = {}  # choosing and observing, by batch

    def observe(self, outcome: StepOutcome, now: int, *, observed_before: bool) -> None:
        """Take in what a step spent.

        Args:
            observed_before: the step before was taken in in full, so that it is known what that
                took.
        """
        batch = len(outcome.rounds)
        if outcome.peek_s > 0.0:
            if self._peek is None:
                self._peek = Level(outcome.peek_s / batch, 0, now)
            else:
                self._peek.add(outcome.peek_s / batch, 0, now)
        choose, take_in = self._decisions.setdefault(batch, (Mean(), Mean()))
        if outcome.choose_s > 0.0:
            choose.add(outcome.choose_s, _jump(choose))
        if outcome.observe_s > 0.0 and observed_before:
            take_in.add(outcome.observe_s, _jump(take_in))
        lengths = [part.k if part.paid else part.shadow for part in outcome.rounds]
        drafted = sum(lengths)
        self._has_drafted = self._has_drafted or drafted > 0
        caught_up = outcome.caught_up
        if caught_up:  # how much of the time was drafting is not known then
            self._read(outcome.draft_s, lengths, caught_up, now)
        elif drafted and outcome.draft_s > 0.0:
            num = len([k for k in lengths if k])
            for k in set(lengths) - {0}:
                self._add(num, k, outcome.draft_s * k / drafted, now)

    def scale(self, ratio: float, since: int) -> None:
        """Take all drafts for so many times as long; see `Staircase.scale`."""
        for levels in self._drafts.values():
            for level in levels.values():
                level.scale(ratio, since)
        if self._reading is not None:
            self._reading.scale(ratio, since)
        self._times.clear()

    def correct(self, ratio: float) -> None:
        """Multiply what was timed outside serving; see `Level.correct`."""
        for levels in self._drafts.values():
            for level in levels.values():
                level.correct(ratio)
        if self._reading is not None:
            self._reading.correct(ratio)
        self._times.clear()

    def calibrate(self, k: int, seconds: float, num: int = 1) -> None:
        """Take in the drafting of k tokens for each of `num` sequences, timed outside serving."""
        self._has_drafted = True
        self._add(num, k, seconds / num, 0)

    def calibrate_reading(self, seconds: float) -> None:
        """Take in what one token takes that is read to catch up, timed outside serving."""
        self._reading = Level(seconds, 0, 0)

    def peek_s(self, batch: int) -> float:
        """Return what lookups for a batch take, whatever is then verified."""
        return 0.0 if self._peek is None else batch * self._peek.seconds

    def decide_s(self, batch: int) -> float:
        """Return what the policy itself takes for a step that it decides about."""
        known = self._decisions.get(batch)
        return 0.0 if known is None else known[0].seconds + known[1].seconds

    def times(self, num: int) -> list[float]:
        """Return the seconds of k drafted tokens of one of `num` sequences, by k from 0.

        Example: what two sequences took together for 4 tokens each is 2 * times(2)[4].
        """
        times = self._times.get(num)
        if times is None:
            times = self._times[num] = self._work_out(num)
        return times

    def drafting_s(self, widths: Sequence[int]) -> float:
        """Return what drafting for a batch takes, widths of 0 counting as no sequence."""
        drafting = [k for k in widths if k]
        times = self.times(len(drafting)) if drafting else NOTHING
        return sum([times[k] for k in drafting])

    def catch_up_s(self, behind: int) -> float:
        """Return what reading that many tokens takes before anything can be drafted.

        A token that is read beside others takes no more than one that is drafted.
        """
        if not behind:
            return 0.0
        return behind * (self.times(1)[1] if self._reading is None else self._reading.seconds)

    def worst_s(self, widths: Sequence[int], classic_s: float, behind: int = 0) -> float:
        """Return what drafting for a batch may take at worst.

        Args:
            classic_s: a classic step, which an untimed drafter is measured by.
            behind: tokens that it has to read first, for all sequences.
        """
        if self._has_drafted:
            return WORST_DRAFT * (self.drafting_s(widths) + self.catch_up_s(behind))
        return UNTIMED_DRAFT * (sum(widths) + behind) * classic_s

    def state(self) -> dict[str, list[list[float]]]:
        """Return everything that was measured of drafters, as JSON values."""
        return {
            "peek": [] if self._peek is None else [self._peek.state()],
            "reading": [] if self._reading is None else [self._reading.state()],
            "draft": [
                [num, k, *level.state()]
                for num, levels in sorted(self._drafts.items())
                for k, level in sorted(levels.items())
            ],
        }

    def restore(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Take over what `state` returned."""
        self._drafts.clear()
        self._times.clear()
        self._peek = Level.restored(state["peek"][0]) if state["peek"] else None
        reading = state.get("reading")  # which profiles of drafters that never read lack
        self._reading = Level.restored(reading[0]) if reading else None
        for num, k, *level in state["draft"]:
            self._drafts.setdefault(int(num), {})[int(k)] = Level.restored(level)
            self._has_drafted = True

    def _add(self, num: int, k: int, seconds: float, now: int) -> None:
        levels = self._drafts.setdefault(num, {})
        if k in levels:
            levels[k].add(seconds, 0, now)
        else:
            levels[k] = Level(seconds, 0, now)
        self._times.clear()

    def _read(self, draft_s: float, lengths: Sequence[int], caught_up: int, now: int) -> None:
        """Learn what a token takes that was read, from what drafting left of a step's time."""
        if caught_up < LEAST_READ:
            return
        if self._drafts:
            seconds = max(draft_s - self.drafting_s(lengths), 0.0) / caught_up
        else:
            seconds = draft_s / (caught_up + sum(lengths))
        if self._reading is None:
            self._reading = Level(seconds, 0, now)
        else:
            self._reading.add(seconds, 0, now)

    def _work_out(self, num: int) -> list[float]:
        """Return the times of a number of sequences, those of the nearest one that was seen.

        A drafter works token by token, so a k that was not seen scales from the nearest.
        """
        if not self._drafts:
            return NOTHING
        levels = self._drafts[min(self._drafts, key=lambda known: (abs(known - num), known))]
        seen, at, times = sorted(levels), 0, [0.0]
        for k in range(1, MAX_K + 1):
            while at + 1 < len(seen) and abs(seen[at + 1] - k) < abs(seen[at] - k):
                at += 1
            times.append(k * levels[seen[at]].seconds / seen[at])
        return times


def _jump(mean: Mean) -> float:
    return DECISION_JUMP * mean.seconds if mean.weight else FIRST_DECISION_S
