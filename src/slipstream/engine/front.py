"""`generate` and `stream`, for whatever checks requests, queues them and returns their chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence

from slipstream.engine.delivery import Item, chunks, replies
from slipstream.engine.prompt import Prompt, each_with_params
from slipstream.engine.request import Request
from slipstream.types import Chunk, Reply, SamplingParams

Stream = Generator[Chunk, None, None]


class Front(ABC):
    """What a caller uses who wants replies and need not know of steps."""

    @abstractmethod
    def check(self, prompt: Prompt, params: SamplingParams | None = None) -> list[Request]:
        """Return the choices of a checked request, to be queued.

        Raises:
            RequestError: the request is wrong.
        """

    @abstractmethod
    def _open(self, choices: list[Request]) -> Callable[[], Item]:
        """Queue a request and return what waits for its next item."""

    @abstractmethod
    def _close(self, request_id: int) -> None:
        """Cancel a request if it still runs, and hand out nothing more of it."""

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Reply]:
        """Return the replies to prompts, in order, choices side by side; all share forwards.

        Args:
            prompts: a list of prompts, each text, token ids or messages; a single text is one
                prompt.
            params: for all of them, or one per prompt.

        Raises:
            RequestError: a request is wrong; none was run.
            SlipstreamError: a request could not go on.
        """
        requests = [self.check(prompt, p) for prompt, p in each_with_params(prompts, params)]
        try:
            opened = [(len(choices), self._open(choices)) for choices in requests]
            return [reply for count, take in opened for reply in replies(count, take)]
        finally:
            for choices in requests:
                self._close(choices[0].id)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Return an iterator over what each round adds; a choice's last chunk carries its reply.

        The request is checked now and queued when the first chunk is asked for. Closing the
        iterator, or dropping it unfinished, cancels it.

        Raises:
            RequestError: the request is wrong.
        """
        return self._stream(self.check(prompt, params))

    def _stream(self, choices: list[Request]) -> Stream:
        try:
            yield from chunks(len(choices), self._open(choices))
        finally:
            self._close(choices[0].id)
