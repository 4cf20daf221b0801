"""The engine: takes requests, runs one forward a step, hands out what each step adds.

A step is one round for every running request: draft, verify, accept, commit (or a chunk of prefill
while a prompt is read). The target picks every emitted token itself, so drafting changes when a
token comes and never which. Not thread-safe: call it from one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

from slipstream.config import EngineConfig
from slipstream.drafters.base import Drafter
from slipstream.engine import phases
from slipstream.engine.pages import PagePool
from slipstream.engine.prompt import Prompt, Template, prompt_ids
from slipstream.engine.request import Limits, Request, Tokenizer, make_request
from slipstream.engine.round import Round, padding_multiple
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.target import Target
from slipstream.errors import RequestError, SlipstreamError
from slipstream.types import Chunk, Output, Reply, SamplingParams, Usage

Stream = Generator[Chunk, None, None]


class Engine:
    """Serves one target model.

    Args:
        target: the compiled model.
        tokenizer: encodes text prompts, detokenizes replies, names the model's stop ids.
        template: renders conversations.
        config: settings; `k`, `prefill_chunk` and `verify_pad` are read here.
        make_drafter: returns a fresh drafter for each request; None never drafts.
        load_s: seconds that loading took, echoed in every reply.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        *,
        template: Template | None = None,
        config: EngineConfig,
        make_drafter: Callable[[], Drafter] | None = None,
        load_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self._template = template
        self.config = config
        self.load_s = load_s
        self.pages = PagePool(target.kv)
        self._scheduler = Scheduler(prefill_chunk=config.prefill_chunk)
        self._limits = Limits(
            vocab_size=target.arch.vocab_size,
            max_model_len=target.max_model_len,
            k=config.k,
            model_stop_ids=frozenset(tokenizer.stop_ids),
        )
        self._make_drafter = make_drafter
        self._pad_to = padding_multiple(config.verify_pad)
        self._clock = clock
        self._num_submitted = 0
        # Chunks of requests that `generate` and `stream` follow, by request id.
        self._inboxes: dict[int, deque[Chunk]] = {}

    @property
    def has_chat_template(self) -> bool:
        """Whether a prompt may be a list of messages."""
        return self._template is not None

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._scheduler)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request and return its id.

        Args:
            prompt: text that is encoded as it stands, token ids, or messages for the model's chat
                template.

        Raises:
            RequestError: the request is wrong; nothing of it was queued.
        """
        request = self._checked(prompt, params)
        self._scheduler.add(request)
        return request.id

    def step(self) -> list[Output]:
        """Run one forward and return what it adds to each request; [] when nothing is queued.

        If it raises, the requests that took part are dropped, their pages freed, and the engine
        goes on with the next.
        """
        batch = self._schedule()
        if not batch:
            return []
        with self._dropped_on_error(batch):
            phases.peek(batch, self._clock)
            phases.choose(batch)
            phases.propose(batch, self._clock, vocab_size=self._limits.vocab_size)
            phases.verify(batch, self.target, self.pages, self._clock, pad_to=self._pad_to)
            phases.accept(batch)
            phases.commit(batch)
            phases.observe(batch, self._clock())
            return self._outputs(batch)

    def cancel(self, request_id: int) -> Reply | None:
        """End a request now and free its pages.

        Returns:
            The reply as far as it came, or None if no such request runs or waits.
        """
        request = self._scheduler.remove(request_id)
        if request is None:
            return None
        self._release([request])
        request.finish_reason = "cancelled"
        text = request.append_text([])
        reply = self._reply(request)
        self._deliver(request_id, Chunk(text=text, token_ids=[], accepted=0, reply=reply))
        return reply

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Reply]:
        """Return one reply per prompt, in order.

        Args:
            prompts: a list of prompts as `submit` takes them; a single text is one prompt.
            params: for all of them, or one per prompt.

        Raises:
            RequestError: a request is wrong; none was run.
        """
        texts: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(texts)
        if len(each) != len(texts):
            raise RequestError(f"{len(texts)} prompts need as many params, got {len(each)}")
        requests = [self._checked(text, p) for text, p in zip(texts, each, strict=True)]
        try:
            for request in requests:
                self._follow(request)
            return [c.reply for r in requests for c in self._chunks(r) if c.reply]
        finally:
            for request in requests:
                self._unfollow(request)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Return an iterator over what each round adds; its last chunk carries the reply.

        The request is checked now and queued when the first chunk is asked for. Closing the
        iterator cancels it.

        Raises:
            RequestError: the request is wrong.
        """
        return self._stream(self._checked(prompt, params))

    def _stream(self, request: Request) -> Stream:
        try:
            self._follow(request)
            yield from self._chunks(request)
        finally:
            self._unfollow(request)

    def _checked(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        """Return a checked request that is not queued yet."""
        self._num_submitted += 1
        return make_request(
            self._num_submitted,
            prompt_ids(prompt, self.tokenizer, self._template),
            params or SamplingParams(),
            limits=self._limits,
            tokenizer=self.tokenizer,
            make_drafter=self._make_drafter,
        )

    def _follow(self, request: Request) -> None:
        """Queue a request and keep its chunks for `_chunks`."""
        self._inboxes[request.id] = deque()
        self._scheduler.add(request)

    def _unfollow(self, request: Request) -> None:
        """Drop a followed request with all that is left of it."""
        self._inboxes.pop(request.id, None)
        self.cancel(request.id)

    def _chunks(self, request: Request) -> Iterator[Chunk]:
        """Yield a followed request's chunks, stepping whenever none is there."""
        inbox = self._inboxes[request.id]
        reply = None
        while reply is None:
            while not inbox:
                if request.id not in self._scheduler:
                    raise SlipstreamError("the request was dropped when a step of it failed")
                for output in self.step():
                    self._deliver(output.request_id, output.chunk)
            chunk = inbox.popleft()
            reply = chunk.reply
            yield chunk

    def _deliver(self, request_id: int, chunk: Chunk) -> None:
        if request_id in self._inboxes:
            self._inboxes[request_id].append(chunk)

    def _schedule(self) -> list[Round]:
        """Return the rounds of this step."""
        batch = self._scheduler.batch()
        for part in batch:
            part.request.stats.start(self._clock())
        return batch

    def _outputs(self, batch: list[Round]) -> list[Output]:
        """Return what the step adds to each request; finished ones leave."""
        outputs = []
        for part in batch:
            if not part.emitted:
                continue
            request = part.request
            text, reply = request.append_text(part.emitted), None
            if request.finish_reason is not None:
                self._scheduler.remove(request.id)
                self._release([request])
                reply = self._reply(request)
            chunk = Chunk(
                text=text,
                token_ids=part.emitted,
                accepted=min(part.accepted, len(part.emitted)),
                reply=reply,
            )
            outputs.append(Output(request_id=request.id, chunk=chunk))
        return outputs

    @contextmanager
    def _dropped_on_error(self, batch: list[Round]) -> Iterator[None]:
        """Drop the batch's requests if the block raises, so that the next step can go on."""
        try:
            yield
        except BaseException:
            requests = [part.request for part in batch]
            for request in requests:
                self._scheduler.remove(request.id)
            self._release(requests)
            raise

    def _release(self, requests: Sequence[Request]) -> None:
        """Give back what requests hold: first all pages, then what drafters keep."""
        for request in requests:
            request.sequence.release(self.pages)
        for request in requests:
            if request.drafter is not None:
                request.drafter.release()

    def _reply(self, request: Request) -> Reply:
        """Return a finished request's reply."""
        assert request.finish_reason is not None
        sequence, stats = request.sequence, request.stats
        return Reply(
            text="".join(request.text),
            token_ids=sequence.output_ids,
            finish_reason=request.finish_reason,
            seed=request.seed,
            usage=Usage(
                prompt_tokens=sequence.prompt_len, completion_tokens=sequence.num_generated
            ),
            timing=stats.timing(load_s=self.load_s, completion_tokens=sequence.num_generated),
            speculation=stats.report(
                policy=request.policy,
                requested_k=request.requested_k,
                drafter=request.drafter_name,
            ),
        )
