"""Who gets what a step adds to a request, and reading it back from an inbox."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from slipstream.errors import SlipstreamError
from slipstream.types import Chunk, Reply

Item = Chunk | SlipstreamError
Receiver = Callable[[Item], None]

_log = logging.getLogger(__name__)


class Deliveries:
    """Receivers by request id."""

    def __init__(self) -> None:
        self._receivers: dict[int, Receiver] = {}

    def expect(self, request_id: int, receive: Receiver) -> None:
        """Hand a request's chunks to `receive` from now on."""
        self._receivers[request_id] = receive

    def forget(self, request_id: int) -> None:
        """Hand out nothing more."""
        self._receivers.pop(request_id, None)

    def hand_out(self, request_id: int, item: Item) -> bool:
        """Hand an item to its receiver, if it has one; return False if the receiver raised."""
        receive = self._receivers.get(request_id)
        if receive is None:
            return True
        try:
            receive(item)
        except Exception as error:
            _log.warning("the receiver of request %d failed: %r", request_id, error)
            return False
        return True


def chunks(num_choices: int, take: Callable[[], Item]) -> Iterator[Chunk]:
    """Yield a request's chunks up to the last one of its last choice.

    Args:
        take: returns the next item.

    Raises:
        SlipstreamError: what an item says, or an item itself.
    """
    while num_choices:
        item = take()
        error = item if isinstance(item, SlipstreamError) else item.error
        if error is not None:
            raise error
        assert isinstance(item, Chunk)
        num_choices -= item.reply is not None
        yield item


def replies(num_choices: int, take: Callable[[], Item]) -> list[Reply]:
    """Return a request's replies in order of choice. See `chunks`."""
    ended = {c.choice: c.reply for c in chunks(num_choices, take) if c.reply is not None}
    return [ended[choice] for choice in sorted(ended)]
