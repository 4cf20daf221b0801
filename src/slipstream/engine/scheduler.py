"""Which requests take part in the next step, and with how many rows.

Requests are admitted in order of arrival, as soon as one of `max_num_seqs` places is free and the
pages that the request may need at most are not promised to others. So a running request never
waits for a page, and nothing has to be thrown out again. All decoding requests take part in every
step; what prefill may have of it goes to prompts in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from slipstream.engine.budget import RowBudget
from slipstream.engine.pages import PagePool
from slipstream.engine.prefix import Ids, Node
from slipstream.engine.request import Request
from slipstream.engine.round import Round


class Scheduler:
    """Requests that run and requests that wait, both in order of arrival."""

    def __init__(self, budget: RowBudget, pages: PagePool) -> None:
        self._budget = budget
        self._pages = pages
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        # The request that was last found too large, and what there was for it then.
        self._refused: tuple[Request, int, int] | None = None

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that take part in steps."""
        return self._running

    def __contains__(self, request_id: int) -> bool:
        return any(request.id == request_id for request in self)

    def __iter__(self) -> Iterator[Request]:
        yield from self._running
        yield from self._waiting

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def remove(self, request_id: int) -> list[Request]:
        """Take all choices of a request out, running or waiting; none if it is not here."""
        found = [request for request in self if request.id == request_id]
        for request in found:
            self.finish(request)
        return found

    def finish(self, request: Request) -> None:
        """Take one request out."""
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        if self._refused and self._refused[0] is request:
            self._refused = None

    def batch(self) -> list[Round]:
        """Return the next step's parts; empty when nothing is to do."""
        self._admit()
        decoding = [r for r in self._running if r.sequence.num_generated]
        rounds = [Round.next_of(request, 1) for request in decoding]
        rows = self._budget.prefill_rows(len(decoding))
        coming: set[tuple[Node, Ids]] = set()
        for request in self._running:
            if rows < 1 or request.sequence.num_generated:
                continue
            request.sequence.adopt(self._pages)
            prefix = request.sequence.next_prefix(self._pages)
            if prefix in coming:  # another prompt's chunk writes that very page in this step
                continue
            if prefix is not None:
                coming.add(prefix)
            rounds.append(Round.next_of(request, rows))
            rows -= rounds[-1].num_rows
        return rounds

    def _admit(self) -> None:
        """Let requests in from the front of the queue while places and pages last."""
        while self._waiting and len(self._running) < self._budget.num_seqs:
            request = self._waiting[0]
            if not self._fits(request):
                return
            self._running.append(self._waiting.popleft())

    def _fits(self, request: Request) -> bool:
        """Whether the pages that a request may need are not promised; cached ones need no room."""
        promised = sum(r.max_pages - len(r.sequence.pages) for r in self._running)
        available = self._pages.num_free - promised
        if request.max_pages <= available:
            return True
        attempt = request, available, self._pages.num_published
        if attempt == self._refused:
            return False
        request.sequence.adopt(self._pages)
        held = len(request.sequence.pages)
        if request.max_pages - held <= self._pages.num_free - promised:
            return True
        request.sequence.release()
        self._refused = attempt
        return False
