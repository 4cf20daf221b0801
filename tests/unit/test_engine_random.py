"""Any sequence of submits, steps, cancels and readers that stop: the engine stays sound and exact.

The fake model's KV is the token ids themselves, so a page that is shared, freed or rolled back
wrongly changes a text, and every text is compared with a serial run that drafts nothing.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.delivery import Item
from slipstream.engine.engine import Engine
from slipstream.engine.front import Stream
from slipstream.types import Chunk, DetailedReply, Reply, SamplingParams
from tests.engine_checks import check_engine
from tests.fake_model import Scripted, fake_engine

Facts = tuple[str, list[int], str, Any]
LEN = 96
BASE = [(5 * i) % 97 for i in range(64)]

PROMPTS = st.builds(
    lambda start, length, tail: (*BASE[start : start + length], *tail),
    st.sampled_from([0, 0, 0, 16, 3]),
    st.integers(1, 48),
    st.lists(st.integers(0, 96), max_size=3),
)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    seed=st.integers(0, 3),
    k=st.sampled_from(["off", "auto", 1, 3, 7, 15]),
    n=st.sampled_from([1, 1, 1, 3]),
    stop=st.sampled_from([(), ("><1",), ("<5", "7><")]),
    stop_token_ids=st.sampled_from([(), (13,)]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logprobs=st.sampled_from([None, None, 1]),
    ignore_eos=st.booleans(),
)


@cache
def serial(prompt: tuple[int, ...], params: SamplingParams) -> list[Facts]:
    """Return what each choice gives when it runs alone, one token a step, nothing cached."""
    engine = fake_engine(
        max_model_len=LEN, k="off", max_num_seqs=1, prefix_cache="off", stop_ids=[11]
    )
    plain = dataclasses.replace(params, k=None)
    return [facts(reply) for reply in engine.generate([list(prompt)], plain)]


def facts(reply: Reply) -> Facts:
    """Return what must not depend on anything but prompt, parameters and seed."""
    logprobs = reply.logprobs if isinstance(reply, DetailedReply) else None
    return reply.text, reply.token_ids, reply.finish_reason, logprobs


class Machine(RuleBasedStateMachine):
    """An engine under random use."""

    engine: Engine

    @initialize(
        num_seqs=st.integers(1, 8),
        rows=st.sampled_from([0, 0, 8, 20]),
        chunk=st.sampled_from([1, 5, 16, 40, 256]),
        pages=st.sampled_from([0, 6, 9, 20]),
        prefix_cache=st.sampled_from(["on", "on", "off"]),
        pad=st.sampled_from(["auto", "4"]),
        drafter=st.sampled_from(["none", "ngram", "right", "wrong"]),
    )
    def start(self, drafter: str, pages: int, rows: int, pad: str, chunk: int, **rest: Any) -> None:
        # What the target says to BASE; only some requests follow it, so acceptance is ragged.
        script = [*BASE[:48], *serial(tuple(BASE[:48]), SamplingParams(max_tokens=40))[0][1]]
        drafters = {
            "none": None,
            "ngram": NGramDrafter,
            "right": lambda: Scripted(script, free=True),
            "wrong": lambda: Scripted(script, lambda n, place: place == n % 4),
        }
        self.engine = fake_engine(
            drafter=drafters[drafter],  # type: ignore[arg-type]
            max_model_len=LEN,
            max_num_seqs=rest["num_seqs"],
            max_batch_rows=rows,
            prefill_chunk=chunk,
            kv_tokens=16 * pages,
            prefix_cache=rest["prefix_cache"],
            verify_pad=pad,
            stop_ids=[11],
        )
        self.running: dict[int, int] = {}  # choices that have no reply yet, by request
        # Replies, what their chunks held, and what they must be; a receiver must not raise.
        self.ended: list[tuple[Reply, list[int], Facts]] = []
        self.streams: list[tuple[Stream, tuple[int, ...], SamplingParams]] = []

    @rule(prompt=PROMPTS, params=PARAMS)
    def submit(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        choices = self.engine.check(list(prompt), params)
        request_id, texts = choices[0].id, serial(prompt, params)
        ids: list[list[int]] = [[] for _ in choices]

        def receive(item: Item) -> None:
            assert isinstance(item, Chunk)
            ids[item.choice] += item.token_ids
            if item.reply is not None:
                self.running[request_id] -= 1
                self.ended.append((item.reply, ids[item.choice], texts[item.choice]))

        self.engine.queue(choices, receive)
        self.running[request_id] = params.n

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()
            check_engine(self.engine)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        left = self.running[request_id]
        assert len(self.engine.cancel(request_id)) == left
        assert self.running.pop(request_id) == 0

    @rule(prompt=PROMPTS, params=PARAMS)
    def open_stream(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        stream = self.engine.stream(list(prompt), params)
        self.streams.append((stream, prompt, params))

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), count=st.integers(0, 3))
    def read_and_leave(self, data: st.DataObject, count: int) -> None:
        stream, prompt, params = data.draw(st.sampled_from(self.streams))
        self.streams.remove((stream, prompt, params))
        got: dict[int, list[int]] = {}
        for _ in range(count):
            chunk = next(stream, None)
            if chunk is not None:
                got.setdefault(chunk.choice, []).extend(chunk.token_ids)
        stream.close()
        for choice, ids in got.items():
            assert ids == serial(prompt, params)[choice][1][: len(ids)]

    @invariant()
    def replies_are_the_serial_ones(self) -> None:
        for reply, ids, expected in self.ended:
            assert reply.token_ids == ids
            if reply.finish_reason == "cancelled":
                assert ids == expected[1][: len(ids)]
            else:
                assert facts(reply) == expected
        self.ended.clear()

    @invariant()
    def is_sound(self) -> None:
        check_engine(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for stream, _, _ in self.streams:
            stream.close()
        for _ in range(10_000):
            if not self.engine.num_requests:
                break
            self.engine.step()
        self.replies_are_the_serial_ones()
        assert not any(self.running.values())
        check_engine(self.engine)
        assert (self.engine.num_requests, self.engine.pages.num_taken) == (0, 0)
        assert self.engine.pages.num_free == self.engine.pages.num_pages


TestRandomUse = Machine.TestCase
TestRandomUse.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
