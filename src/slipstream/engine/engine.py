"""The engine: takes requests, runs one forward a step, hands out what each step adds.

A step is one round for every running request: draft, verify, accept, commit (or a chunk of prefill
while a prompt is read). The target picks every emitted token itself, so drafting, batch-mates and
cached prefixes change when a token comes and never which. Not thread-safe: call it from one thread,
or through `engine.threaded`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from slipstream.config import EngineConfig
from slipstream.engine import drafting, phases
from slipstream.engine.budget import RowBudget
from slipstream.engine.check import Limits, Tokenizer, check_request
from slipstream.engine.delivery import Deliveries, Item, Receiver
from slipstream.engine.front import Front
from slipstream.engine.grammar import Grammars
from slipstream.engine.pages import PagePool
from slipstream.engine.pairing import MakeDrafter, Pairing
from slipstream.engine.prefix import PrefixCache
from slipstream.engine.prompt import Prompt, Template, prompt_ids
from slipstream.engine.reply import last_chunk, make_chunk, make_reply
from slipstream.engine.request import Request
from slipstream.engine.round import Round, padding_multiple
from slipstream.engine.sampling import kernel_beside
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.stats import EngineStats
from slipstream.engine.target import Target
from slipstream.errors import SlipstreamError
from slipstream.types import Output, Reply, SamplingParams

T = TypeVar("T")


class Engine(Front):
    """Serves one target model.

    Args:
        target: the compiled model.
        tokenizer: encodes text prompts, detokenizes replies, names the model's stop ids.
        template: renders conversations.
        config: settings of batch, prefix cache, k and padding are read here.
        make_drafters: each returns a fresh drafter for a request; none never drafts.
        pairing: drafters and policy with what they have learned, in place of `make_drafters`.
        pages: the target's pages as another engine left them, its cached prefixes included; the
            two never run at the same time.
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
        make_drafters: Sequence[MakeDrafter] = (),
        pairing: Pairing | None = None,
        pages: PagePool | None = None,
        load_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self._template = template
        self.config = config
        self.load_s = load_s
        cache = PrefixCache() if config.prefix_cache == "on" else None
        self.pages = pages or PagePool(target.kv, cache=cache)
        self._budget = RowBudget.of(config, target.arch.vocab_size)
        self._scheduler = Scheduler(self._budget, self.pages)
        self._limits = Limits(
            vocab_size=target.arch.vocab_size,
            max_model_len=target.max_model_len,
            num_pages=target.kv.num_pages,
            k=config.k,
            max_k=config.max_k,
            model_stop_ids=frozenset(tokenizer.stop_ids),
            steps_sample=getattr(target.step, "samples", False),
        )
        self.pairing = pairing or Pairing.fresh(config, make_drafters)
        self.policy = self.pairing.policy
        self.observers: list[phases.Observer] = []  # told every step in full, e.g. to record it
        self._kernel = kernel_beside(target.backend)
        self._grammars = Grammars(tokenizer, target.arch.vocab_size)
        self._pad_to = padding_multiple(config)
        self._clock = clock
        self._ended = self._took = 0.0  # when the last step ended, and its seconds
        self._observe_s = 0.0  # what the policy took for taking it in
        self._ids = itertools.count(1)
        self._numbers = itertools.count(1)
        self.stats = EngineStats()
        self._deliveries = Deliveries()

    @property
    def has_chat_template(self) -> bool:
        """Whether a prompt may be a list of messages."""
        return self._template is not None

    @property
    def template_roles(self) -> frozenset[str]:
        """Roles that the chat template asks for by name."""
        return frozenset(getattr(self._template, "roles", ()))

    @property
    def num_requests(self) -> int:
        """Choices that run or wait."""
        return len(self._scheduler)

    @property
    def running(self) -> Sequence[Request]:
        """Choices that take part in steps; the others wait for a place or for pages."""
        return self._scheduler.running

    def read(self, reader: Callable[[Engine], T], timeout_s: float | None = None) -> T:
        """Return what a function makes of the engine as it is between two steps."""
        return reader(self)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request and return its id, which all its choices share.

        Args:
            prompt: text that is encoded as it stands, token ids, or messages for the model's chat
                template.

        Raises:
            RequestError: the request is wrong; nothing of it was queued.
        """
        choices = self.check(prompt, params)
        self.queue(choices)
        return choices[0].id

    def check(self, prompt: Prompt, params: SamplingParams | None = None) -> list[Request]:
        """Return the choices of a checked request, to be queued. Any thread may call this.

        Raises:
            RequestError: the request is wrong.
        """
        return check_request(
            next(self._ids),
            prompt_ids(prompt, self.tokenizer, self._template, max_len=self._limits.max_model_len),
            params or SamplingParams(),
            limits=self._limits,
            tokenizer=self.tokenizer,
            pairing=self.pairing,
            numbers=self._numbers,
            kernel=self._kernel,
            grammars=self._grammars,
        )

    def queue(self, choices: Sequence[Request], receive: Receiver | None = None) -> None:
        """Queue what `check` returned.

        Args:
            receive: gets every chunk as soon as a step or a cancel has made it, or one error if
                the request is dropped. If it raises, the request is cancelled.
        """
        if receive is not None:
            self._deliveries.expect(choices[0].id, receive)
        for choice in choices:
            self._scheduler.add(choice)

    def step(self) -> list[Output]:
        """Run one forward and return what it adds to each request; [] when nothing is queued.

        If it raises, the requests that took part are dropped, their pages freed, and the engine
        goes on with the next. A drafter that raises is dropped alone.
        """
        began = self._began()
        batch = self._schedule()
        if not batch:
            return []
        try:
            outputs = self._run(batch, began)
        except BaseException as cause:
            ids = {part.request.id for part in batch}
            self._drop(ids, "the request was dropped when a step of it failed", cause)
            raise
        self._deliver(outputs)
        return outputs

    def cancel(self, request_id: int) -> list[Reply]:
        """End a request now and free its pages.

        Returns:
            The replies of its unfinished choices, as far as they came; none if it does not run.
        """
        choices = self._scheduler.remove(request_id)
        self.stats.cancelled += len(choices)
        outputs, ended = [], []
        for request in choices:
            request.finish_reason = "cancelled"
            text = request.text.finish()
            ended.append(make_reply(request, load_s=self.load_s))
            chunk = last_chunk(request, text, ended[-1])
            outputs.append(Output(request_id=request_id, chunk=chunk))
        self._release(choices)
        self._deliver(outputs)
        return ended

    def forget(self, request_id: int) -> None:
        """Cancel a request that nobody waits for any more."""
        self._deliveries.forget(request_id)
        self.cancel(request_id)

    def close(self) -> None:
        """Keep what was learned in the pairing's profile; the engine can go on. May be repeated."""
        self.pairing.save()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def drop_all(self, message: str) -> None:
        """End every request without a reply; receivers get an error that says so."""
        self._drop({request.id for request in self._scheduler}, message)

    def _open(self, choices: list[Request]) -> Callable[[], Item]:
        inbox: deque[Item] = deque()
        self.queue(choices, inbox.append)
        return partial(self._take, inbox)

    def _close(self, request_id: int) -> None:
        self.forget(request_id)

    def _take(self, inbox: deque[Item]) -> Item:
        """Return the next item of an inbox, stepping until there is one."""
        while not inbox:
            assert self.num_requests, "a request left without a last word"
            self.step()
        return inbox.popleft()

    def _deliver(self, outputs: Sequence[Output]) -> None:
        """Hand outputs to those who wait for them; requests whose receiver failed are cancelled."""
        for output in outputs:
            if not self._deliveries.hand_out(output.request_id, output.chunk):
                self.forget(output.request_id)
        for output in outputs:
            if output.chunk.reply is not None and output.request_id not in self._scheduler:
                self._deliveries.forget(output.request_id)

    def _schedule(self) -> list[Round]:
        """Return the rounds of this step."""
        batch = self._scheduler.batch()
        for part in batch:
            part.request.stats.start(self._clock())
        return batch

    def _run(self, batch: list[Round], began: float) -> list[Output]:
        """Take the rounds of a step through all its phases."""
        vocab_size = self._limits.vocab_size
        # Where nobody may draft, a step is that of an engine without a drafter.
        policy = self.policy if any(part.request.fixed_k != 0 for part in batch) else None
        phases.peek(batch, policy, self._clock, vocab_size=vocab_size)
        choose_s = phases.choose(batch, policy, self._budget, self._clock)
        phases.propose(batch, self._clock, vocab_size=vocab_size)
        phases.verify(batch, self.target, self.pages, self._clock, pad_to=self._pad_to)
        phases.accept(batch)
        phases.read(batch)
        phases.score(batch)
        phases.commit(batch, self.pages)
        now = self._clock()
        spent = phases.Spent(choose_s, self._observe_s)
        self._observe_s = phases.observe(
            batch, self.stats, policy, self.observers, spent, self._clock, began=began, now=now
        )
        self._ended, self._took = now, now - began
        return self._outputs(batch)

    def _began(self) -> float:
        """Return when this step began: where the last one ended, unless the caller paused.

        What is done between two steps is part of serving, so a round pays for it; a gap longer
        than the step before it is somebody else's time.
        """
        now = self._clock()
        if now - self._ended <= self._took:
            return self._ended
        self._observe_s = 0.0
        return now

    def _outputs(self, batch: list[Round]) -> list[Output]:
        """Return what the step adds to each request; finished ones leave."""
        outputs = []
        for part in batch:
            request, reply = part.request, None
            if not part.is_last:
                continue
            if request.finish_reason is not None:
                reply = make_reply(request, load_s=self.load_s)
                self._scheduler.finish(request)
                self._release([request])
                self.stats.finished += 1
            outputs.append(Output(request_id=request.id, chunk=make_chunk(part, reply)))
        return outputs

    def _drop(
        self, request_ids: Iterable[int], message: str, cause: BaseException | None = None
    ) -> None:
        """End requests without a reply and tell those who wait for them."""
        for request_id in request_ids:
            error = SlipstreamError(message)
            error.__cause__ = cause
            choices = self._scheduler.remove(request_id)
            self._release(choices)
            self.stats.dropped += len(choices)
            self._deliveries.hand_out(request_id, error)
            self._deliveries.forget(request_id)

    def _release(self, requests: Sequence[Request]) -> None:
        """Give back what requests hold: first all pages, then what drafters keep."""
        for request in requests:
            request.sequence.release()
        for request in requests:
            drafting.let_go(request)
            if self.policy is not None:
                self.policy.forget(request.number)
