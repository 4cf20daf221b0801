"""Between the engine's thread and the event loop that talks to clients.

The engine's thread gathers what a step adds to all requests, and one message takes it to the loop,
where every stream that waits is woken. So a round costs one wake-up however many clients there are,
and a client's chunks are coalesced if it was slow. A whole reply wakes nobody before its end.

A request takes a place when it comes and gives it back when its stream is closed, however that
happens: answered, refused, timed out, or left by its client. Its check may be given up as well: the
client is answered at once, and the thread that checks stops at the next prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slipstream.engine.delivery import Item
from slipstream.engine.engine import Engine
from slipstream.engine.prompt import Prompt
from slipstream.engine.request import Request
from slipstream.engine.sampling.validation import MAX_CHOICES
from slipstream.engine.threaded import ThreadedEngine
from slipstream.errors import RequestError, SlipstreamError
from slipstream.server.failures import HttpFailure
from slipstream.server.metrics import Metrics
from slipstream.server.trial import Trial
from slipstream.types import Chunk, SamplingParams

# Two templates may render and two long prompts be encoded at a time: it is Python, so more threads
# would only take turns. Requests with a grammar have a thread of their own, so that others do not
# wait for a compiler.
NUM_CHECKERS = 2
NUM_COMPILERS = 1
# Processor time for the grammar of one request, which is compiled for each of its replies: a usual
# one takes 1 to 3 ms.
MAX_COMPILE_S = 1.0
RETRY_AFTER_S = 1  # a place is free again within a second or two on a busy server


class Bridge:
    """Lets requests of an event loop into an engine.

    Made on the loop that it serves. Nobody else may use the engine from now on.

    Args:
        max_open: choices that may run and wait; a request that comes beyond is refused.
    """

    def __init__(self, engine: Engine, metrics: Metrics, *, max_open: int) -> None:
        self.metrics = metrics
        self.max_open = max_open
        self.num_open = 0
        self.is_draining = False
        self._loop = asyncio.get_running_loop()
        self._streams: set[Stream] = set()
        self._fresh: dict[Stream, list[Arrival]] = {}  # of the engine's thread alone
        self._checks: set[_Check] = set()
        self._checkers = ThreadPoolExecutor(NUM_CHECKERS, thread_name_prefix="slipstream-check")
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="slipstream-compile")
        self._trial = Trial(engine.tokenizer, engine.target.arch.vocab_size)
        self.threaded = ThreadedEngine(engine, self._hand_over)

    async def open(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, is_streamed: bool
    ) -> Stream:
        """Check a request, queue it, and return what its chunks come from.

        Args:
            prompts: at least one; each gets `params.n` replies.
            is_streamed: wake the caller after every round, not at the end only.

        Raises:
            RequestError: the request is wrong; nothing of it was queued.
            HttpFailure: there is no place for all its replies, or the server is stopping.
        """
        if self.is_draining:
            raise stopping()
        places = len(prompts) * max(1, min(params.n, MAX_CHOICES))  # `n` is not checked yet
        if places > self.max_open:  # it would be told to come again for ever
            raise RequestError(
                f"a request may have at most {self.max_open} replies here, got {places}",
                param="n",
                code="too_many_replies",
                hint="ask for fewer at a time, or serve with a larger max_queue",
            )
        if self.num_open + places > self.max_open:
            raise HttpFailure(
                429,
                f"at most {self.max_open} replies may run and wait",
                code="queue_full",
                hint="try again later, or serve with a larger max_queue",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self.num_open += places  # checks wait for a thread, so they are bounded as well
        try:
            requests = await self._checked(prompts, params, places)
            if self.is_draining:
                raise stopping()
            stream = Stream(self, requests, is_streamed=is_streamed, forbids=_forbids(params))
            self._streams.add(stream)
            return stream
        except BaseException:
            self.num_open -= places
            raise

    def drain(self) -> None:
        """Refuse what comes from now on; what runs goes on."""
        self.is_draining = True

    def end_all(self, error: SlipstreamError) -> None:
        """End what runs, or is being checked, with an error."""
        for check in list(self._checks):
            check.end(error)
        for stream in list(self._streams):
            stream.fail(error)

    def close(self) -> None:
        """End the engine's thread after its step; its profile is kept. May be repeated."""
        self.is_draining = True
        self._trial.close()
        for pool in (self._checkers, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)
        self.threaded.close()

    async def _checked(
        self, prompts: Sequence[Prompt], params: SamplingParams, places: int
    ) -> list[list[Request]]:
        """Return the choices of each prompt once they are checked, on another thread."""
        check = _Check()
        pool = self._checkers if params.grammar is None else self._compilers
        work = self._loop.run_in_executor(pool, self._check, check, prompts, params, places)
        check.work = work
        self._checks.add(check)
        try:
            return await work
        except asyncio.CancelledError:
            if check.error is None:
                raise
            raise check.error from None
        finally:
            self._checks.discard(check)
            check.is_over = True
            self._trial.give_up(check)

    def _check(
        self, check: _Check, prompts: Sequence[Prompt], params: SamplingParams, places: int
    ) -> list[list[Request]]:
        """Do what `_checked` waits for. Runs on a pool's thread."""
        if params.grammar is not None and not check.is_over:
            cost_s = places * self._trial.cpu_s(params.grammar, check)
            if cost_s > MAX_COMPILE_S:
                raise RequestError(
                    f"grammar must be one that compiles within {MAX_COMPILE_S:g} s of processor "
                    f"time for all replies together, got {cost_s:.1f} s for {places} replies",
                    param="grammar",
                    code="grammar_too_expensive",
                    hint="ask for fewer replies at a time",
                )
        checked = []
        for prompt in prompts:
            if check.is_over:
                raise stopping()  # nobody hears it
            checked.append(self.threaded.check(prompt, params))
        return checked

    def _hand_over(self) -> None:
        """Take what a step added to the loop. Runs on the engine's thread."""
        if self._fresh:
            fresh, self._fresh = self._fresh, {}
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                self._loop.call_soon_threadsafe(_deliver, fresh)


@dataclass(eq=False)
class _Check:
    """One request's check.

    Attributes:
        work: what waits for it.
        error: what it was ended with.
        is_over: nobody waits for it any more.
    """

    work: asyncio.Future[list[list[Request]]] | None = None
    error: SlipstreamError | None = None
    is_over: bool = False

    def end(self, error: SlipstreamError) -> None:
        """Have whoever waits for it go on with an error."""
        if self.work is not None and not self.work.done():
            self.error = error
            self.work.cancel()


def stopping() -> HttpFailure:
    """Return what requests end with when the server stops."""
    return HttpFailure(503, "the server is stopping", code="stopping", headers={"Retry-After": "5"})


def _forbids(params: SamplingParams) -> bool:
    banned = params.bad_words or params.bad_words_ids or params.logit_bias
    return bool(banned or params.grammar)


Arrival = tuple[int, Item]  # which prompt, and what came


def _deliver(fresh: dict[Stream, list[Arrival]]) -> None:
    for stream, arrivals in fresh.items():
        stream.push(arrivals)


class Stream:
    """What the engine adds to the prompts of one HTTP request.

    Args:
        requests: the choices of each prompt.
        forbids: the request forbids tokens, so it is to blame where none is left to choose.

    Attributes:
        num_choices: replies that it will bring.
        left: how many of them are to come.
    """

    def __init__(
        self,
        bridge: Bridge,
        requests: Sequence[list[Request]],
        *,
        is_streamed: bool,
        forbids: bool,
    ) -> None:
        self.num_choices = self.left = sum(map(len, requests))
        self._bridge = bridge
        self._ids = [choices[0].id for choices in requests]
        self._arrived: list[tuple[int, Chunk]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: SlipstreamError | None = None
        self._is_closed = False
        self._forbids = forbids
        try:
            for index, choices in enumerate(requests):
                bridge.threaded.queue(choices, _Receiver(bridge, self, index, choices, is_streamed))
                for request in choices:
                    bridge.metrics.started(request)
        except SlipstreamError:  # the engine was closed
            raise stopping() from None

    async def take(self) -> list[tuple[int, Chunk]]:
        """Return all chunks that came since the last call, each with its prompt's number.

        Waits until there is one. The list is shared with nobody.

        Raises:
            SlipstreamError: the request could not go on.
        """
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._waiter = self._bridge._loop.create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        return arrived

    def push(self, arrivals: list[Arrival]) -> None:
        """Take what came, and wake whoever waits for it."""
        for index, item in arrivals:
            if self._error is not None or self._is_closed:
                return
            if isinstance(item, SlipstreamError):
                self.fail(item)
            elif item.error is not None:
                error = item.error
                if self._forbids and not isinstance(error, RequestError):
                    error = RequestError(error.message, code="no_token", hint=error.hint)
                self.fail(error)
            else:
                self.left -= item.reply is not None
                self._arrived.append((index, item))
        self._wake()

    def fail(self, error: SlipstreamError) -> None:
        """End it with an error, after what came already; the engine stops within a round."""
        if self._error is None:
            self._error = error
            self._cancel()
            self._wake()

    def close(self) -> None:
        """Give its place back; what the engine still does for it is cancelled. May be repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._bridge.num_open -= self.num_choices
        self._bridge._streams.discard(self)
        if self.left:
            self._cancel()

    def _cancel(self) -> None:
        for request_id in self._ids:
            self._bridge.threaded.cancel(request_id)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class _Receiver:
    """Takes the chunks of one prompt on the engine's thread."""

    __slots__ = ("_bridge", "_choices", "_index", "_is_streamed", "_kept", "_last_s", "_stream")

    def __init__(
        self,
        bridge: Bridge,
        stream: Stream,
        index: int,
        choices: list[Request],
        is_streamed: bool,
    ) -> None:
        self._bridge = bridge
        self._stream = stream
        self._index = index
        self._choices = choices
        self._is_streamed = is_streamed
        self._kept: list[Arrival] = []
        # When each choice last had a token; at first, when it came.
        self._last_s = [time.perf_counter()] * len(choices)

    def __call__(self, item: Item) -> None:
        if isinstance(item, Chunk):
            self._measure(item)
        else:
            self._bridge.metrics.finished("error")
        self._kept.append((self._index, item))
        if self._is_streamed or isinstance(item, SlipstreamError) or item.reply is not None:
            kept, self._kept = self._kept, []
            fresh = self._bridge._fresh
            if self._stream in fresh:
                fresh[self._stream] += kept
            else:
                fresh[self._stream] = kept

    def _measure(self, chunk: Chunk) -> None:
        """Tell the metrics about a chunk."""
        metrics, now = self._bridge.metrics, time.perf_counter()
        request = self._choices[chunk.choice]
        waited = now - self._last_s[chunk.choice]
        self._last_s[chunk.choice] = now
        if chunk.token_ids:
            if request.sequence.num_generated == len(chunk.token_ids):
                metrics.first_token(waited)
            else:
                count = len(chunk.token_ids)
                metrics.inter_token(waited / count, count)
        if chunk.reply is not None:
            metrics.finished(chunk.reply.finish_reason)
