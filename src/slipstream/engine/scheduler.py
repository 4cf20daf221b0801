"""Which requests take part in the next step.

One runs at a time and the others wait in order. The engine asks for a batch all the same, so that
more at once is a larger `max_running` and a shared chunk budget here, and nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.engine.request import Request
from slipstream.engine.round import Round


class Scheduler:
    """Requests in order of arrival; the first `max_running` of them run.

    Args:
        prefill_chunk: prompt tokens of one step at most.
    """

    def __init__(self, *, prefill_chunk: int, max_running: int = 1) -> None:
        self._prefill_chunk = prefill_chunk
        self._max_running = max_running
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._requests[request.id] = request

    def remove(self, request_id: int) -> Request | None:
        """Take a request out, running or waiting; None if it is not here."""
        return self._requests.pop(request_id, None)

    def batch(self) -> list[Round]:
        """Return the next step's parts; empty when nothing is to do."""
        running = list(self)[: self._max_running]
        return [Round.next_of(request, self._prefill_chunk) for request in running]
