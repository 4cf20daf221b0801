"""An engine that many threads may use at once: their requests share forwards.

One thread of its own owns the engine and runs its steps. Others never touch it: they check requests
on their side, which changes nothing there, and post what is to be done between two steps. What a
step adds is handed to the request's own receiver. So there is no lock around the engine, nobody
waits for more than one step, and a caller who goes away only posts a cancel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from slipstream.engine.delivery import Item, Receiver
from slipstream.engine.engine import Engine
from slipstream.engine.front import Front
from slipstream.engine.prompt import Prompt
from slipstream.engine.request import Request
from slipstream.errors import SlipstreamError
from slipstream.types import SamplingParams

Command = Callable[[], object]
T = TypeVar("T")

_log = logging.getLogger(__name__)


class ThreadedEngine(Front):
    """Serves requests from any thread; a context manager that closes itself.

    Args:
        engine: nobody else may use it from now on; its counters and settings may be read.
        handed_out: called on the engine's thread when all receivers have what a step or a cancel
            had for them, so that they can share one message to another thread. It must not raise.
    """

    def __init__(self, engine: Engine, handed_out: Command = lambda: None) -> None:
        self.engine = engine
        self._handed_out = handed_out
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
        choices = self.check(prompt, params)
        self.queue(choices, receive)
        return choices[0].id

    def queue(self, choices: list[Request], receive: Receiver) -> None:
        """Queue what `check` returned. See `submit`."""
        if not self._post(partial(self.engine.queue, choices, receive)):
            raise SlipstreamError("the engine is closed")

    def check(self, prompt: Prompt, params: SamplingParams | None = None) -> list[Request]:
        """Return the choices of a checked request. See `Engine.check`."""
        return self.engine.check(prompt, params)

    def cancel(self, request_id: int) -> None:
        """End a request after the current step; its receiver gets what there is of its replies."""
        self._post(partial(self.engine.cancel, request_id))

    def read(self, reader: Callable[[Engine], T], timeout_s: float | None = None) -> T:
        """Return what a function makes of the engine as it is between two steps.

        Args:
            reader: runs on the engine's thread, and a step waits for it: it must not take long. It
                changes nothing.
            timeout_s: how long to wait for the current step; None waits for its end.

        Raises:
            TimeoutError: the step took longer.
        """
        answer: Future[T] = Future()
        if not self._post(partial(_answer, answer, reader, self.engine)):
            self._thread.join(timeout_s)  # what is in its last step is not between two
            if self._thread.is_alive():
                raise TimeoutError
            return reader(self.engine)
        return answer.result(timeout_s)

    def save(self) -> None:
        """Keep what was learned, after the current step."""
        self._post(self.engine.close)

    @property
    def is_closed(self) -> bool:
        """Whether no more requests are served."""
        return self._is_closed

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

    def _open(self, choices: list[Request]) -> Callable[[], Item]:
        inbox: SimpleQueue[Item] = SimpleQueue()
        self.queue(choices, inbox.put)
        return inbox.get

    def _close(self, request_id: int) -> None:
        self._post(partial(self.engine.forget, request_id))

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
                self._handed_out()
        finally:
            with self._lock:
                self._is_closed = True
            self.engine.drop_all("the engine was closed")
            self._handed_out()
            self.engine.close()

    def _obey(self) -> bool:
        """Run what was posted, waiting for it if the engine is idle; False ends the thread."""
        try:
            while True:
                if not self.engine.num_requests:  # no step will follow
                    self._handed_out()
                command = self._posted.get(block=not self.engine.num_requests)
                if command is None:
                    return False
                command()
        except Empty:
            return True


def _answer(answer: Future[T], reader: Callable[[Engine], T], engine: Engine) -> None:
    """Run a reader and keep what it returns, or raises, for the thread that asked."""
    try:
        answer.set_result(reader(engine))
    except Exception as error:
        answer.set_exception(error)
