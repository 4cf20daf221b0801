"""What a whole round costs: verify, drafting and overhead, against a measured classic step.

Time runs from round start to round start, so host work, sampling and synchronisation are in it, and
a draft belongs to the round that verifies it. A classic step is timed as a whole, in real k = 0
rounds, because it is what the user would have had otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from slipstream.policy.base import Expected, StepOutcome
from slipstream.policy.cost import DEFAULT_EDGES, Staircase
from slipstream.policy.draft_cost import DraftCost
from slipstream.policy.estimate import fallback_multiple
from slipstream.policy.level import Mean
from slipstream.policy.load_check import LoadCheck
from slipstream.types import MAX_K

# Classic steps of a batch size before its first draft, and at a context octave that is new to it
# one: the first may compile, two agree.
FIRST_CLASSIC = 3
# The lower bound of a classic step lies this many standard errors below its mean.
VALUE_SIGMAS = 1.0
# Lower bound of a forward with prompt rows, as a share of its mean: such steps are never repeated
# often enough for a confidence bound of their own.
PREFILL_VALUE = 0.95
# The share of a round that one sample may add to the overhead.
OVERHEAD_JUMP = 0.25
# What the host does may take this much longer than expected.
WORST_HOST = 1.5
# Rounds that a change of the machine takes to be noticed at several widths.
CHANGE_ROUNDS = 16
# Rounds before a classic step's time may be doubted.
DOUBT_AFTER = 8
# When a classic step of a profile was seen: it is taken again before anything drafts.
LONG_AGO = -(1 << 30)


class RoundCost:
    """Seconds of rounds by rows, context and drafted tokens.

    Args:
        edges: row buckets of the device's dispatch table.
        bandwidth_bound: a verify is known to read the weights once.
        pad_to: the rows of a forward that drafts are filled up to a multiple of this.

    Attributes:
        verify, classic: forwards by rows, classic steps by batch.
        drafting: what drafting and deciding take.
    """

    def __init__(
        self,
        edges: Sequence[int] = DEFAULT_EDGES,
        *,
        bandwidth_bound: bool = False,
        pad_to: int = 1,
    ) -> None:
        self.verify = Staircase(edges)
        self.classic = Staircase(())  # every batch size is a bucket of its own
        self.drafting = DraftCost()
        self.bandwidth_bound = bandwidth_bound
        self.pad_to = pad_to
        self._overheads = {False: Mean(), True: Mean()}  # by whether the round drafted
        self._check = LoadCheck()

    def observe(self, outcome: StepOutcome, now: int, *, observed_before: bool = True) -> None:
        """Take in a step: its forward under its rows, a classic step as a whole as well.

        A classic step counts without what the policy and the drafters spent in it, for it is what
        the user would have had otherwise. A step that took no time at all, as with a clock that
        stands still, says nothing.

        Args:
            observed_before: the step before was taken in too.
        """
        if outcome.round_s <= 0.0 or outcome.verify_s < 0.0 or outcome.spent_s < 0.0:
            return
        rounds = outcome.rounds
        batch, drafted = len(rounds), sum(part.k for part in rounds)
        kv = outcome.prefill_kv + sum(part.context_len for part in rounds)
        rows = batch + drafted + outcome.prefill_rows
        own_s = outcome.round_s - outcome.spent_s
        verify_s = outcome.verify_s or own_s
        if not (self._check.is_over or drafted or outcome.prefill_rows) and outcome.verify_s:
            self._compare(rows, kv, verify_s)
        self.verify.observe(self.padded(rows) if drafted else rows, kv, verify_s, now)
        if drafted == 0 and outcome.prefill_rows == 0:
            self._follow(self.classic.observe(batch, kv, own_s, now), now)
        # The overhead of a round that drafts is all of the host's, deciding included.
        decided_s = outcome.choose_s + outcome.observe_s if drafted else 0.0
        rest_s = own_s - verify_s + decided_s
        self._overheads[drafted > 0].add(rest_s, OVERHEAD_JUMP * outcome.round_s)
        self.drafting.observe(outcome, now, observed_before=observed_before)

    def _compare(self, rows: int, kv_tokens: int, forward_s: float) -> None:
        """Correct what was timed at load by the first classic steps; see load_check."""
        ratio = self._check.add(rows, self.verify.time_s(rows, kv_tokens), forward_s)
        if ratio != 1.0:
            self.verify.correct(ratio)
            self.drafting.correct(ratio)

    def _follow(self, ratio: float, now: int) -> None:
        """Believe of all times what was just believed of a classic step: the machine has changed.

        It has other work to do, or has done with it. What was not run since would else look cheap,
        or dear, until it has been run a few times.
        """
        if ratio != 1.0:
            since = now - CHANGE_ROUNDS
            for times in (self.verify, self.classic, self.drafting):
                times.scale(ratio, since)

    def doubt_classic(self, outcome: StepOutcome, now: int) -> bool:
        """Have the classic step of a step's sequences timed again before they draft.

        Returns:
            Whether it was not timed just now.
        """
        kv = sum([part.context_len for part in outcome.rounds])
        level = self.classic.level(len(outcome.rounds), kv)
        if level is None or now - level.seen_at < DOUBT_AFTER:
            return False
        level.seen_at = LONG_AGO
        return True

    def padded(self, rows: int) -> int:
        """Return the rows of a forward that drafts, padding included."""
        return -(-rows // self.pad_to) * self.pad_to

    def forwards_s(self, rows: int, count: int, kv_tokens: int) -> list[float | None]:
        """Return the seconds of `count` forwards that draft, from `rows` live rows on."""
        if self.pad_to == 1:
            return self.verify.times_s(rows, count, kv_tokens)
        padded = [self.padded(rows + more) for more in range(count)]
        return [self.verify.time_s(each, kv_tokens) for each in padded]

    @property
    def overhead_s(self) -> float:
        """Host work of a round that drafts; as long as there was none, that of classic steps."""
        drafting = self._overheads[True]
        return drafting.seconds if drafting.weight else self._overheads[False].seconds

    def calibrate(self, rows: int, kv_tokens: int, seconds: float) -> None:
        """Take in a forward that was timed outside serving, padding counted as rows."""
        self.verify.observe(rows, kv_tokens, seconds)

    def knows_classic(self, batch: int, kv_tokens: int) -> bool:
        """Tell whether classic steps of a batch size were timed at a context like this one."""
        level = self.classic.level(batch, kv_tokens)
        return level is not None and self.classic.samples(batch) >= FIRST_CLASSIC

    def classic_s(self, batch: int, kv_tokens: int) -> float | None:
        """Return a classic step's seconds; guessed from a verify only where none was measured."""
        measured = self.classic.time_s(batch, kv_tokens)
        if measured is None:
            measured = self.verify.time_s(batch, kv_tokens)
            overhead_s = self._overheads[False].seconds
            measured = None if measured is None else measured + overhead_s
        return self._guess(batch, kv_tokens) if measured is None else measured

    def value_s(self, batch: int, kv_tokens: int) -> float | None:
        """Return the lower confidence bound of a classic step."""
        low = self.classic.low_s(batch, kv_tokens, VALUE_SIGMAS)
        return self.classic_s(batch, kv_tokens) if low is None else low

    def step_value_s(
        self,
        batch: int,
        riding_rows: int,
        kv_tokens: int,
        prefill_kv: int,
        value_s: float | None = None,
    ) -> float:
        """Return a lower bound of the step without drafts, 0 where none is known.

        Args:
            value_s: that of a classic step, if the caller has it.
        """
        low = self.value_s(batch, kv_tokens) or 0.0 if value_s is None else value_s
        if riding_rows == 0:
            return low
        mean = self.base_s(batch, riding_rows, kv_tokens + prefill_kv) or 0.0
        return max(low, PREFILL_VALUE * mean)

    def base_s(self, batch: int, riding_rows: int, kv_tokens: int) -> float | None:
        """Return the step without drafts of the policy's: a classic step, or what rides along."""
        if riding_rows == 0:
            return self.classic_s(batch, kv_tokens)
        forward = self.verify.time_s(batch + riding_rows, kv_tokens)
        return None if forward is None else forward + self._overheads[False].seconds

    def round_s(self, rows: int, kv_tokens: int, draft_s: float) -> float | None:
        """Return a round's seconds, None where its row bucket was never measured."""
        forward = self.verify.time_s(self.padded(rows), kv_tokens)
        return None if forward is None else forward + draft_s + self.overhead_s

    def expected(self, outcome: StepOutcome) -> Expected:
        """Return what a step was expected to take and what it stands in for."""
        rounds = outcome.rounds
        batch, riding = len(rounds), outcome.prefill_rows
        own_kv = sum([part.context_len for part in rounds])
        classic_s = base_s = self.classic.time_s(batch, own_kv)
        drafted = sum([part.k for part in rounds])
        if not drafted:
            return Expected(classic_s, classic_s, None)
        kv = own_kv + outcome.prefill_kv
        if riding:
            base_s = self.base_s(batch, riding, kv)
        paid = [part.k if part.paid else 0 for part in rounds]
        draft_s = self.drafting.peek_s(batch) + self.drafting.drafting_s(paid)
        draft_s += self.drafting.catch_up_s(outcome.caught_up)
        return Expected(classic_s, base_s, self.round_s(batch + drafted + riding, kv, draft_s))

    def worst_s(
        self,
        rows: int,
        kv_tokens: int,
        draft_widths: Sequence[int],
        classic_s: float,
        behind: int = 0,
    ) -> float:
        """Return what a round may take at worst, for ever where nothing was measured.

        Args:
            draft_widths: what the paid drafter drafts for each sequence.
            classic_s: a classic step of the same batch.
            behind: tokens that the paid drafter has to read first.
        """
        forward = self.verify.worst_s(self.padded(rows), kv_tokens)
        if forward is None:
            return math.inf
        drafting_s = self.drafting.worst_s(draft_widths, classic_s, behind)
        return forward + drafting_s + WORST_HOST * self.overhead_s

    def state(self) -> dict[str, list[list[float]]]:
        """Return everything measured as JSON values."""
        return {
            "verify": self.verify.state(),
            "classic": self.classic.state(),
            **self.drafting.state(),
            "overheads": [[mean.seconds, mean.weight] for mean in self._overheads.values()],
        }

    def restore(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Take over what `state` returned."""
        self.verify.restore(state["verify"])
        self.classic.restore(state["classic"], LONG_AGO)
        self.drafting.restore(state)
        self._check = LoadCheck()
        for mean, (seconds, weight) in zip(
            self._overheads.values(), state["overheads"], strict=True
        ):
            mean.seconds, mean.weight = seconds, weight

    def _guess(self, batch: int, kv_tokens: int) -> float | None:
        """Return a classic step's seconds from the cheapest verify of the same batch."""
        for k in range(1, MAX_K + 1):
            verify_s = self.verify.time_s(self.padded(batch + k), kv_tokens)
            if verify_s is not None:
                return verify_s / fallback_multiple(k, bandwidth_bound=self.bandwidth_bound)
        return None
