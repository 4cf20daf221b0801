"""Classic steps that have nothing to teach, accounted for a few at a time.

Where nothing is drafted the policy must cost next to nothing: a step of a small model takes two
milliseconds, and a hundredth of that is all that may ever be lost. So while the same requests go on
without a proposal, a step adds to three sums; every few steps one is looked at in full.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.policy.base import StepOutcome
from slipstream.policy.cost import octave_of
from slipstream.policy.ledger import held_up_s

# Steps in a row that may pass by: a full look takes some 90 us, and a change of pace is seen within
# so many steps.
MAX_QUIET = 63


class Quiet:
    """Steps that passed by since one was looked at in full.

    Attributes:
        requests: those that run.
        value_s: lower bound of a classic step of theirs.
        count: steps that are not accounted for yet.
        classic_s, spent_s: their seconds, without and of lookups and policy.
        held_s: how much of the former the machine held them up.
    """

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.value_s = 0.0
        self._octave_ends = 0
        self._room_s = self._leak_s = 0.0
        self._left = 0
        self.clear()

    def start(
        self, outcome: StepOutcome, value_s: float | None, *, room_s: float, leak_s: float
    ) -> None:
        """Go by a step that was looked at in full.

        Args:
            value_s: its worth; None lets no step like it pass by.
            room_s: seconds of lookups and choices that the loss budget has room for.
            leak_s: seconds of them in a step that its leak pays for.
        """
        self.requests = [part.request for part in outcome.rounds]
        kv_tokens = sum([part.context_len for part in outcome.rounds])
        self._octave_ends = 1 << octave_of(kv_tokens)
        self.value_s = value_s or 0.0
        self._room_s = room_s
        self._leak_s = leak_s
        self._left = 0 if value_s is None else MAX_QUIET

    def add(
        self,
        requests: Sequence[int],
        kv_tokens: int,
        *,
        asked_s: float,
        spent_s: float,
        round_s: float,
    ) -> bool:
        """Count a step; False if it should be looked at in full.

        Lookups and choices that take more than the leak pays for are a reason to look, for they may
        have to be made less often; what the policy took for its last look is none.
        """
        if self._left == 0 or kv_tokens >= self._octave_ends or requests != self.requests:
            return False
        if asked_s > self._leak_s:
            if asked_s > self._room_s:
                return False
            self._room_s -= asked_s - self._leak_s
        self._left -= 1
        self.count += 1
        self.spent_s += spent_s
        classic_s = round_s - spent_s
        self.classic_s += classic_s
        self.held_s += held_up_s(classic_s, self.value_s)
        return True

    def clear(self) -> None:
        """All that passed by is accounted for."""
        self.count = 0
        self.classic_s = self.spent_s = self.held_s = 0.0
