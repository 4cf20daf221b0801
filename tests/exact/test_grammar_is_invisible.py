"""A reply under a grammar is the same with any drafter, k, batch-mates and back end's own sampling.

Real forwards of a tiny random model, whose vocabulary spells JSON; everything is compared with the
reply that drafts nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import pytest

from slipstream.config import EngineConfig
from slipstream.drafters.base import Drafter
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.draft_model import DraftSource
from slipstream.engine.engine import Engine
from slipstream.engine.load import choose_drafters
from slipstream.engine.matcher import Matcher
from slipstream.engine.target import build_target
from slipstream.types import Grammar, Reply, SamplingParams
from tests.fake_model import Scripted, always_wrong
from tests.grammars import OTHER_STOP, SCHEMAS, STOP, TOKENIZER, VOCAB_SIZE, schema_grammar
from tests.tiny import BACKENDS, make_backend, tiny_arch, tiny_tensors, tiny_weights

ARCH = tiny_arch(vocab_size=VOCAB_SIZE, context_len=256)
PROMPT = TOKENIZER.encode('Say "name": "tags": ["red"] for {"name": "Ada"}', parse_special=False)
MAX_TOKENS = 60
GRAMMARS = {
    **{name: schema_grammar(name) for name in ("person", "tree", "fixed", "both")},
    "object": Grammar(kind="json_object"),
    "pattern": Grammar(kind="regex", definition=r"(yes|no), (because|as) [a-z ]{5,40}\."),
}
# An untrained model seldom closes what it opens.
CLOSING = {ord(c) - 32: 3.0 for c in '"}],'}
# A pattern that is long in the memory of its automaton, and a limit that a reply exceeds half-way.
HOSTILE, LEXER_STATES = "([a-z ]*x[a-z ]{10}|[a-z ]*y[a-z ]{9})*!", 45
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "sampled": SAMPLED,
    "filtered": {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "all": {**SAMPLED, "frequency_penalty": 0.7, "min_tokens": 12, "bad_words_ids": [[STOP]]},
}


@cache
def model(backend_name: str) -> tuple[Any, Any]:
    """Return a back end and the model's tensors."""
    return make_backend(backend_name), tiny_tensors(ARCH, seed=4)


def engine_of(
    backend_name: str, drafter: Callable[[], Drafter] | None = None, **settings: Any
) -> Engine:
    """Return an engine around the tiny model."""
    backend, tensors = model(backend_name)
    config = EngineConfig(**settings)
    target = build_target(ARCH, backend, lambda own: tiny_weights(own, tensors), config)
    makers = [drafter] if drafter else ()
    return Engine(target, TOKENIZER, config=config, make_drafters=makers)


def params_of(grammar: str, how: str, **changes: Any) -> SamplingParams:
    """Return the parameters of a request."""
    fields = {"max_tokens": MAX_TOKENS, "logit_bias": CLOSING, **PARAMS[how], **changes}
    return SamplingParams(grammar=GRAMMARS[grammar], **fields)


@cache
def classic(backend_name: str, grammar: str, how: str) -> Reply:
    """Return the reply of an engine that never drafts."""
    (reply,) = engine_of(backend_name).generate([PROMPT], params_of(grammar, how))
    return reply


def outcome(reply: Reply) -> tuple[Any, ...]:
    """Return what must not depend on speculation."""
    return reply.token_ids, reply.text, reply.finish_reason


def drafters(reply: Reply, seed: int) -> dict[str, Callable[[], Drafter]]:
    """Return drafters that know a reply, more or less."""
    draw = random.Random(seed)
    script = PROMPT + reply.token_ids
    return {
        "ngram": NGramDrafter,
        "right": lambda: Scripted(script),
        "wrong": lambda: Scripted(script, always_wrong, free=True),
        "uneven": lambda: Scripted(script, lambda _round, _place: draw.random() < 0.3, free=True),
        "beyond": lambda: Scripted([*script, *PROMPT, *PROMPT]),
    }


@pytest.mark.parametrize("how", PARAMS)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_replies_do_not_depend_on_drafter_and_k(grammar: str, how: str) -> None:
    expected = classic("cpu-auto", grammar, how)
    for k in (1, 2, 5, 15):
        for name, drafter in drafters(expected, k).items():
            (reply,) = engine_of("cpu-auto", drafter, k=k).generate(
                [PROMPT], params_of(grammar, how)
            )
            assert outcome(reply) == outcome(expected), (name, k)


@pytest.mark.parametrize("how", PARAMS)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_replies_do_not_depend_on_a_draft_model(grammar: str, how: str) -> None:
    """It knows nothing of the grammar: what it drafts ends where the grammar forbids it."""
    backend, tensors = model("cpu-auto")
    config = EngineConfig(drafter="x9", k=5)
    target = build_target(
        ARCH,
        backend,
        lambda own: tiny_weights(own, tensors),
        config,
        draft=DraftSource(arch=ARCH, load_weights=lambda own: tiny_weights(own, tensors)),
    )
    engine = Engine(target, TOKENIZER, config=config, make_drafters=choose_drafters(config, target))
    (reply,) = engine.generate([PROMPT], params_of(grammar, how))
    assert outcome(reply) == outcome(classic("cpu-auto", grammar, how))


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_replies_of_every_back_end_and_k_agree(backend_name: str) -> None:
    for grammar in ("person", "object"):
        for how in ("greedy", "sampled"):
            expected = classic(backend_name, grammar, how)
            for k in ("off", 3, "auto"):
                (reply,) = engine_of(backend_name, NGramDrafter).generate(
                    [PROMPT], params_of(grammar, how, k=k)
                )
                assert outcome(reply) == outcome(expected)


def test_replies_do_not_depend_on_batch_mates_and_predictions() -> None:
    cases = [(grammar, how) for grammar in GRAMMARS for how in PARAMS]
    expected = [classic("cpu-auto", *case) for case in cases]
    draw = random.Random(1)
    for k in ("auto", 4):
        params = [
            params_of(*case, prediction=draw.choice([None, reply.text, reply.text[5:] + "x"]))
            for case, reply in zip(cases, expected, strict=True)
        ]
        engine = engine_of("cpu-auto", NGramDrafter, k=k, max_num_seqs=7)
        free = SamplingParams(max_tokens=30, temperature=1.0, seed=1)
        replies = engine.generate([PROMPT] * (len(cases) + 1), [*params, free])
        assert [outcome(r) for r in replies[:-1]] == [outcome(r) for r in expected]
        (alone,) = engine_of("cpu-auto").generate([PROMPT], free)
        assert outcome(replies[-1]) == outcome(alone)
        assert engine.pages.num_taken == 0


def test_replies_that_end_are_valid_and_some_of_each_kind_do() -> None:
    ended = set()
    for grammar in ("person", "tree", "fixed", "both", "object"):
        for how in PARAMS:
            reply = classic("cpu-auto", grammar, how)
            assert reply.finish_reason in ("stop", "length")
            if reply.finish_reason == "stop":
                ended.add(grammar)
                schema = SCHEMAS.get(grammar, {"type": "object"})
                jsonschema.Draft202012Validator(schema).validate(json.loads(reply.text))
    assert len(ended) >= 3
    assert len({classic("cpu-auto", "person", how).text for how in PARAMS}) > 2


def test_every_choice_follows_the_grammar_with_noise_of_its_own() -> None:
    params = params_of("person", "sampled", n=3, logprobs=1)
    for k in ("off", 5):
        replies = engine_of("cpu-auto", NGramDrafter, k=k).generate([PROMPT], params)
        if k == "off":
            expected = [(outcome(r), r.logprobs) for r in replies]  # type: ignore[attr-defined]
            assert len({r.text for r in replies}) > 1
        else:
            got = [(outcome(r), r.logprobs) for r in replies]  # type: ignore[attr-defined]
            assert got == expected


def test_where_steps_sample_a_grammar_s_rows_are_read_and_sampled_here() -> None:
    engine = engine_of("cpu-auto", NGramDrafter)
    object.__setattr__(engine._limits, "steps_sample", True)
    (plain,) = engine.check(PROMPT, SamplingParams(temperature=1.0, seed=1))
    assert plain.sampled_by_step
    assert not plain.reads_logits
    for how in ("greedy", "sampled"):
        (masked,) = engine.check(PROMPT, params_of("object", how))
        assert masked.reads_logits
        assert not masked.sampled_by_step


@pytest.mark.parametrize("limit", range(1, 8))
def test_a_limit_cuts_a_grammar_anywhere(limit: int) -> None:
    whole = classic("cpu-auto", "fixed", "greedy")
    engine = engine_of("cpu-auto", lambda: Scripted(PROMPT + whole.token_ids), k=7)
    (reply,) = engine.generate([PROMPT], params_of("fixed", "greedy", max_tokens=limit))
    assert (reply.token_ids, reply.finish_reason) == (whole.token_ids[:limit], "length")


def test_what_the_grammar_forces_is_drafted_and_accepted() -> None:
    (reply,) = engine_of("cpu-auto", NGramDrafter, k=15).generate(
        [PROMPT], params_of("fixed", "greedy", max_tokens=150)
    )
    assert reply.finish_reason == "stop"
    assert json.loads(reply.text) == SCHEMAS["fixed"]["const"]
    counts = reply.speculation.sources["grammar"]
    assert counts["accepted"] == counts["drafted"] > 10
    assert reply.speculation.drafter == "grammar+ngram"


def test_forbidden_drafts_are_cut_before_they_are_verified() -> None:
    # Right but for a token now and then that no JSON allows there.
    whole = classic("cpu-auto", "person", "greedy")
    script = PROMPT + whole.token_ids

    class Spoiled(Scripted):
        def propose(self, token_ids: Any, k: int) -> list[int]:
            return [*super().propose(token_ids, k)[: k - 1], 0][:k]  # a space, mostly forbidden

    (reply,) = engine_of("cpu-auto", lambda: Spoiled(script, width=3), k=6).generate(
        [PROMPT], params_of("person", "greedy")
    )
    assert outcome(reply) == outcome(whole)
    (control,) = engine_of("cpu-auto", lambda: Spoiled(script, width=3), k=6).generate(
        [PROMPT], SamplingParams(max_tokens=MAX_TOKENS, logit_bias=CLOSING)
    )
    rejected = reply.speculation.drafted - reply.speculation.accepted
    assert rejected < control.speculation.drafted - control.speculation.accepted


@pytest.mark.parametrize("k", ["off", 6])
def test_a_complete_grammar_ends_a_reply_before_min_tokens(k: Any) -> None:
    grammar = Grammar(kind="regex", definition="abc")
    params = SamplingParams(max_tokens=30, min_tokens=20, grammar=grammar, k=k)
    (reply,) = engine_of("cpu-auto", NGramDrafter).generate([PROMPT], params)
    assert (reply.text, reply.finish_reason) == ("abc", "stop")
    assert reply.token_ids[-1] in (STOP, OTHER_STOP)


def test_a_caller_s_own_stop_ids_end_a_complete_grammar_only() -> None:
    digit = ord("7") - 32
    params = SamplingParams(
        max_tokens=30,
        grammar=Grammar(kind="regex", definition="[0-9]{5}"),
        stop_token_ids=(digit,),
        logit_bias={digit: 50.0},
    )
    (reply,) = engine_of("cpu-auto", NGramDrafter, k=4).generate([PROMPT], params)
    assert reply.finish_reason == "stop"
    assert len(reply.text) == 5
    assert reply.token_ids[-1] == digit


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_where_a_grammar_exceeds_its_limits_does_not_depend_on_what_is_drafted(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.engine.grammar.MAX_LEXER_STATES", LEXER_STATES)
    monkeypatch.setitem(GRAMMARS, "hostile", Grammar(kind="regex", definition=HOSTILE))
    draw = random.Random(5)

    class Noise(Scripted):
        def propose(self, token_ids: Any, k: int) -> list[int]:
            return [draw.choice(TOKENIZER.encode("ab ", parse_special=False)) for _ in range(k)]

    replies = []
    for k in ("off", 2, 9):
        engine = engine_of("cpu-auto", lambda: Noise([]), k=15)
        engine.submit(PROMPT, params_of("hostile", how, k=k, logit_bias=None))
        chunks = [out.chunk for _ in range(200) if engine.num_requests for out in engine.step()]
        replies.append(chunks[-1].reply)
    assert replies[0] is not None
    assert replies[0].finish_reason == "error"
    assert 5 < len(replies[0].token_ids) < MAX_TOKENS
    for reply in replies[1:]:
        assert reply is not None
        assert reply.speculation.drafted > 10
        assert outcome(reply) == outcome(replies[0])


def test_a_dead_end_costs_its_request_alone() -> None:
    engine = engine_of("cpu-auto", NGramDrafter, k=4)
    quote = ord('"') - 32
    words = [[i] for i in range(VOCAB_SIZE) if b'"' in TOKENIZER.token_bytes(i)]
    stuck = SamplingParams(max_tokens=150, grammar=GRAMMARS["person"], bad_words_ids=words)
    assert [quote] in words
    first = engine.submit(PROMPT, stuck)
    second = engine.submit(PROMPT, params_of("fixed", "greedy"))
    chunks: dict[int, list[Any]] = {first: [], second: []}
    while engine.num_requests:
        for output in engine.step():
            chunks[output.request_id].append(output.chunk)
    assert chunks[first][-1].reply.finish_reason == "error"
    assert "forbidden" in str(chunks[first][-1].error)
    assert outcome(chunks[second][-1].reply) == outcome(classic("cpu-auto", "fixed", "greedy"))
    assert engine.pages.num_taken == 0


def test_rows_whose_argmax_is_allowed_are_picked_as_if_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_sure = 0
    surely_allows = Matcher.surely_allows

    def counted(self: Matcher, token_id: int) -> bool:
        nonlocal num_sure
        num_sure += surely_allows(self, token_id)
        return False  # so that every row is masked

    monkeypatch.setattr(Matcher, "surely_allows", counted)
    for name in GRAMMARS:
        (reply,) = engine_of("cpu-auto", NGramDrafter, k=3).generate(
            [PROMPT], params_of(name, "greedy", logit_bias=None)
        )
        monkeypatch.undo()
        (quick,) = engine_of("cpu-auto", NGramDrafter, k=3).generate(
            [PROMPT], params_of(name, "greedy", logit_bias=None)
        )
        monkeypatch.setattr(Matcher, "surely_allows", counted)
        assert outcome(quick) == outcome(reply)
    assert num_sure > 10
