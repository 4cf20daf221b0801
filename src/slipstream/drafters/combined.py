"""Several free drafters of one sequence in one: the first that has something to offer is heard.

A later one is heard instead where it offers the same tokens and more: the first is not contradicted
and the round may be wider.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.drafters.base import Drafter


class CombinedDrafter:
    """Asks free drafters in order, and remembers whose proposal was the last.

    Args:
        drafters: one at least, all of them free.

    Attributes:
        sources: names of all of them, in order.
    """

    free = True

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        assert drafters
        assert all(drafter.free for drafter in drafters), "who is asked first must cost nothing"
        self._drafters = list(drafters)
        self._last = self._drafters[0]
        self.sources = tuple(drafter.name for drafter in drafters)
        self.name = "+".join(self.sources)
        self.max_k = max(drafter.max_k for drafter in drafters)

    @property
    def source(self) -> str:
        """Name of the drafter that made the last proposal."""
        return self._last.name

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Return the first offer of at most k tokens, or the longest that begins with it."""
        best: list[int] = []
        for drafter in self._drafters:
            if len(best) >= k:
                break
            offered = drafter.propose(token_ids, min(k, drafter.max_k))
            if len(offered) > len(best) and offered[: len(best)] == best:
                best, self._last = offered, drafter
        return best

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Tell the drafter whose proposal it was."""
        self._last.observe(proposed, accepted)

    def release(self) -> None:
        """Have all of them forget the sequence."""
        for drafter in self._drafters:
            drafter.release()


def source_of(drafter: Drafter) -> str:
    """Return the name of what made a drafter's last proposal."""
    return getattr(drafter, "source", drafter.name)
