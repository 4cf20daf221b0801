"""An engine that many threads may use at once: their requests share forwards.

One thread of its own owns the engine and runs its steps. Others never touch it: they check requests
on their side, which changes nothing there, and post what is to be done between two steps. What a
step adds is handed to the request's own receiver. So there is no lock around the engine, nobody
waits for more than one step, and a caller who goes away only posts a cancel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from slipstream.engine.delivery import Item, Receiver, chunks, replies
from slipstream.engine.engine import Engine, Stream, each_with_params
from slipstream.engine.prompt import Prompt
from slipstream.engine.request import Request
from slipstream.errors import SlipstreamError
from slipstream.types import Reply, SamplingParams

Command = Callable[[], object]

_log = logging.getLogger(__name__)


class ThreadedEngine:
    """Serves requests from any thread; a context manager that closes itself.

    Args:
        engine: nobody else may use it from now on; its counters and settings may be read.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._posted: SimpleQueue[Command | None] = SimpleQueue()  # None ends the thread
        # Reentrant: a stream that is collected as garbage posts its cancel wherever that happens.
        self._lock = threading.RLock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt, params: SamplingParams | None, receive: Receiver) -> int:
        """Queue a request and return its id.

        Args:
            receive: called on the engine's thread with every chunk, the last one of each choice
                carrying its reply, or with an error and nothing after it. It must not block; if it
                raises, the request is cancelled.

        Raises:
            RequestError: the request is wrong; nothing of it was queued.
            SlipstreamError: the engine is closed.
        """
        return self._queue(self.engine.check(prompt, params), receive)

    def cancel(self, request_id: int) -> None:
        """End a request after the current step; its receiver gets what there is of its replies."""
        self._post(partial(self.engine.cancel, request_id))

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Reply]:
        """Return the replies to prompts, in order. See `Engine.generate`.

        Raises:
            RequestError: a request is wrong; none was run.
            SlipstreamError: a step failed, or the engine is closed.
        """
        pairs = each_with_params(prompts, params)
        requests = [self.engine.check(prompt, p) for prompt, p in pairs]
        inboxes: list[SimpleQueue[Item]] = [SimpleQueue() for _ in requests]
        try:
            for choices, inbox in zip(requests, inboxes, strict=True):
                self._queue(choices, inbox.put)
            return [
                reply
                for choices, inbox in zip(requests, inboxes, strict=True)
                for reply in replies(len(choices), inbox.get)
            ]
        finally:
            for choices in requests:
                self._forget(choices)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Return an iterator over what each round adds. See `Engine.stream`.

        Closing it, or dropping it unfinished, cancels the request.

        Raises:
            RequestError: the request is wrong.
        """
        return self._stream(self.engine.check(prompt, params))

    def close(self) -> None:
        """Stop after the current step; what still runs ends with an error. May be repeated."""
        with self._lock:
            self._is_closed = True
            self._posted.put(None)
        self._thread.join()

    def __enter__(self) -> ThreadedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, choices: list[Request]) -> Stream:
        inbox: SimpleQueue[Item] = SimpleQueue()
        try:
            self._queue(choices, inbox.put)
            yield from chunks(len(choices), inbox.get)
        finally:
            self._forget(choices)

    def _queue(self, choices: list[Request], receive: Receiver) -> int:
        if not self._post(partial(self.engine.queue, choices, receive)):
            raise SlipstreamError("the engine is closed")
        return choices[0].id

    def _forget(self, choices: list[Request]) -> None:
        self._post(partial(self.engine.forget, choices[0].id))

    def _post(self, command: Command) -> bool:
        """Have a command run between two steps; False if there will be none."""
        with self._lock:
            if not self._is_closed:
                self._posted.put(command)
            return not self._is_closed

    def _run(self) -> None:
        """Obey and step until closed. Runs on the engine's thread."""
        try:
            while self._obey():
                try:
                    self.engine.step()
                except Exception:  # those it concerns have been told
                    _log.exception("a step failed and its requests were dropped")
        finally:
            with self._lock:
                self._is_closed = True
            self.engine.drop_all("the engine was closed")

    def _obey(self) -> bool:
        """Run what was posted, waiting for it if the engine is idle; False ends the thread."""
        try:
            while True:
                command = self._posted.get(block=not self.engine.num_requests)
                if command is None:
                    return False
                command()
        except Empty:
            return True
