"""A grammar's mask is a function of the tokens so far, and lets only what is valid end."""

from __future__ import annotations

import json
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest

from slipstream.engine import grammar as grammar_module
from slipstream.engine.grammar import MAX_DEFINITION_BYTES, Grammars
from slipstream.engine.matcher import Matcher
from slipstream.errors import RequestError, SlipstreamError
from slipstream.types import Grammar, SamplingParams
from tests.grammars import (
    CONTROL,
    OTHER_STOP,
    PERSON,
    SCHEMAS,
    STOP,
    TOKENIZER,
    VOCAB_SIZE,
    matcher,
    schema_grammar,
    text_of,
)

OBJECT = Grammar(kind="json_object")
WALKS = 12


def allowed_ids(state: Matcher) -> list[int]:
    """Return the ids that may come next."""
    allowed = state.allowed()
    assert allowed is not None
    assert allowed.shape == (VOCAB_SIZE,)
    ids: list[int] = np.flatnonzero(allowed).tolist()
    return ids


def walk(state: Matcher, draw: random.Random, limit: int = 300) -> list[int]:
    """Push random allowed tokens until the reply ends; the later, the rather what closes it."""
    ids: list[int] = []
    for step in range(limit):
        choices = allowed_ids(state)
        closing = [i for i in choices if i == STOP or text_of([i]).strip()[:1] in ('"', "}", "]")]
        hurry = draw.random() < step / 40
        token_id = draw.choice(closing) if closing and hurry else draw.choice(choices)
        state.push(token_id)
        ids.append(token_id)
        if token_id in TOKENIZER.stop_ids:
            break
    return ids


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_reply_that_ends_is_valid(name: str) -> None:
    ended = 0
    for seed in range(WALKS):
        ids = walk(matcher(schema_grammar(name)), random.Random(seed))
        if ids[-1] in TOKENIZER.stop_ids:
            ended += 1
            value = json.loads(text_of(ids[:-1]))
            jsonschema.Draft202012Validator(
                SCHEMAS[name], format_checker=jsonschema.FormatChecker()
            ).validate(value)
    assert ended > WALKS // 2


def test_a_json_object_that_ends_is_an_object() -> None:
    ended = 0
    for seed in range(WALKS):
        ids = walk(matcher(OBJECT), random.Random(seed))
        if ids[-1] in TOKENIZER.stop_ids:
            ended += 1
            assert isinstance(json.loads(text_of(ids[:-1])), dict)
    assert ended > WALKS // 2


@pytest.mark.parametrize("pattern", ["(yes|no)+", "[a-c]{2,5}!?", "a*"])
def test_a_reply_to_a_pattern_matches_all_of_it(pattern: str) -> None:
    for seed in range(WALKS):
        ids = walk(matcher(Grammar(kind="regex", definition=pattern)), random.Random(seed))
        assert ids[-1] in TOKENIZER.stop_ids
        assert re.fullmatch(pattern, text_of(ids[:-1]))


@pytest.mark.parametrize("name", [*SCHEMAS, "object"])
def test_the_mask_depends_on_the_tokens_so_far_alone(name: str) -> None:
    grammar = OBJECT if name == "object" else schema_grammar(name)
    draw = random.Random(name)
    busy = matcher(grammar)
    ids: list[int] = []
    for _ in range(60):
        # What drafting does between two tokens: trials, cuts, looks ahead.
        trial = walk(busy, draw, draw.randrange(6))
        for _ in trial:
            busy.pop()
        busy.allowed_prefix([draw.randrange(VOCAB_SIZE) for _ in range(4)])
        busy.allowed_prefix(trial)
        forced = busy.forced()
        fresh = matcher(grammar, ids)
        assert allowed_ids(busy) == allowed_ids(fresh)
        assert busy.forced() == fresh.forced() == forced
        token_id = draw.choice(allowed_ids(busy))
        if token_id in TOKENIZER.stop_ids:
            break
        busy.push(token_id)
        ids.append(token_id)
    assert ids


@pytest.mark.parametrize("name", [*SCHEMAS, "object"])
def test_what_is_surely_allowed_is_allowed_and_most_of_what_is_allowed_is(name: str) -> None:
    draw = random.Random(name)
    num_allowed = num_sure = 0
    for _ in range(25):
        state = matcher(OBJECT if name == "object" else schema_grammar(name))
        walk(state, draw, draw.randrange(20))
        sure = [i for i in range(VOCAB_SIZE) if state.surely_allows(i)]  # before any mask
        if state.allowed() is None:
            assert not sure
            continue
        allowed = allowed_ids(state)
        assert set(sure) <= set(allowed) - TOKENIZER.stop_ids
        assert sure == [i for i in range(VOCAB_SIZE) if state.surely_allows(i)]
        num_allowed += len(set(allowed) - TOKENIZER.stop_ids)
        num_sure += len(sure)
    assert num_sure == num_allowed > 0


@pytest.mark.parametrize("name", SCHEMAS)
def test_drafts_are_never_cut_before_a_token_that_the_mask_allows(name: str) -> None:
    draw = random.Random(name)
    num_cut = 0
    for _ in range(40):
        state = matcher(schema_grammar(name))
        walk(state, draw, draw.randrange(12))
        if state.allowed() is None:
            continue
        trial = matcher(schema_grammar(name))
        drafts = []
        for _ in range(draw.randrange(1, 8)):
            drafts.append(draw.choice(allowed_ids(state)))
            state.push(drafts[-1])
            if drafts[-1] in TOKENIZER.stop_ids:
                break
        for _ in drafts:
            state.pop()
        assert state.allowed_prefix(drafts) == drafts
        wrong = [*drafts, CONTROL, 3]
        assert state.allowed_prefix(wrong) == drafts
        assert trial.allowed_prefix([CONTROL]) == []
        num_cut += len(drafts)
    assert num_cut > 20


def test_a_broken_row_s_token_is_not_surely_allowed() -> None:
    assert not matcher(OBJECT).surely_allows(-1)


def test_nothing_is_drafted_behind_a_stop_id() -> None:
    grammar = schema_grammar("fixed")
    whole = TOKENIZER.encode(json.dumps(SCHEMAS["fixed"]["const"]), parse_special=False)
    for stop in (STOP, OTHER_STOP):
        state = matcher(grammar)
        assert state.allowed_prefix([*whole, stop, *whole]) == [*whole, stop]
        assert state.allowed_prefix([whole[0], stop]) == [whole[0]]
        for token_id in [*whole, stop]:
            state.push(token_id)
        assert state.allowed() is None
        assert state.allowed_prefix(whole) == []
        assert state.forced() == []


@pytest.mark.parametrize("name", ["fixed", "person", "both"])
def test_what_is_forced_is_all_that_is_allowed(name: str) -> None:
    num_forced = 0
    for seed in range(4):
        state, draw = matcher(schema_grammar(name)), random.Random(seed)
        for _ in range(30):
            forced = state.forced()
            for token_id in forced:
                assert allowed_ids(state) == [token_id]
                state.push(token_id)
            for _ in forced:
                state.pop()
            num_forced += len(forced)
            token_id = draw.choice(allowed_ids(state))
            state.push(token_id)
            if token_id in TOKENIZER.stop_ids:
                break
    assert num_forced > 10


def test_stop_ids_are_allowed_where_the_grammar_is_complete_and_nowhere_else() -> None:
    newline = TOKENIZER.encode("\n", parse_special=False)[0]
    stops = {STOP, OTHER_STOP, newline}
    state = matcher(Grammar(kind="regex", definition="ab?"), stop_ids=stops)
    assert not stops & set(allowed_ids(state))
    state.push(TOKENIZER.encode("a", parse_special=False)[0])
    assert stops < set(allowed_ids(state))
    assert not state.must_stop
    state.push(TOKENIZER.encode("b", parse_special=False)[0])
    assert set(allowed_ids(state)) == stops
    assert state.must_stop
    state.push(newline)
    assert state.allowed() is None
    assert not state.must_stop
    state.pop()
    assert state.must_stop


def test_white_space_between_tokens_of_json_is_bounded() -> None:
    state = matcher(OBJECT, TOKENIZER.encode('{\n  "a": 1,', parse_special=False))
    space, newline = (TOKENIZER.encode(c, parse_special=False)[0] for c in " \n")
    assert {space, newline} <= set(allowed_ids(state))
    state.push(newline)
    for _ in range(64):
        assert space in allowed_ids(state)
        assert newline not in allowed_ids(state)
        state.push(space)
    assert space not in allowed_ids(state)


def test_padding_rows_and_control_tokens_are_never_allowed() -> None:
    draw = random.Random(1)
    state = matcher(OBJECT)
    for _ in range(40):
        ids = allowed_ids(state)
        assert max(ids) < TOKENIZER.vocab_size
        assert CONTROL not in ids
        state.push(draw.choice([i for i in ids if i not in TOKENIZER.stop_ids] or [STOP]))
        if state.allowed() is None:
            break


REFUSED: list[tuple[Any, str]] = [
    ({"type": "strin"}, "at #: Invalid type: strin"),
    ({"properties": {"a": {"items": {"not": {}}}}}, "at #/properties/a/items: Unimplemented keys"),
    ({"anyOf": [{"type": "null"}, {"uniqueItems": True}]}, "at #/anyOf/1: Unimplemented keys"),
    (
        {"$defs": {"x/y": {"pattern": "(a"}}, "properties": {"p": {"$ref": "#/$defs/x~1y"}}},
        "at #/$defs/x~1y: regex parse error: (a ^ error: unclosed group",
    ),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "at #/properties/a: Pointer '/$defs/none'"),
    ({"$ref": "https://example.com/schema.json"}, "at #: Resource 'https://example.com"),
    ({"$ref": "#"}, "that some text of the model's tokens satisfies, got none"),
    (False, "must be a JSON schema that is an object, got false"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    ({"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}]}, "oneOf"),
    ({"type": "string", "format": "haiku"}, "Unknown format: haiku"),
    ({"x-guidance": {"lenient": True}, "not": {}}, 'Unimplemented keys: ["not"]'),
    ({"x-guidance": {"coerce_one_of": True}, "oneOf": [{}, {}]}, "oneOf"),
    ({"properties": 5}, "properties"),
    ('{"type": ', "must be a JSON schema as JSON text, got an error in it: Expecting value"),
    ('{"const": NaN}', "NaN is no JSON value"),
    ("[1]", "must be a JSON schema that is an object, got [1]"),
    ("[" * 100_000, "an error in it: maximum recursion depth"),
    ('{"items":' * 200 + "{}" + "}" * 200, "recursion limit exceeded"),
    ('"' + "x" * MAX_DEFINITION_BYTES + '"', f"at most {MAX_DEFINITION_BYTES} bytes, got"),
    ('{"const": "\ud800"}', "must be valid Unicode, got a lone surrogate"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_a_schema_that_cannot_be_kept_is_refused_and_the_place_named(
    schema: Any, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        matcher(Grammar(kind="json_schema", definition=schema))
    assert message in caught.value.message
    assert caught.value.message.startswith("grammar must be ")
    assert len(caught.value.message) < 500
    assert (caught.value.param, caught.value.code) == ("grammar", "invalid_grammar")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar(kind="regex", definition="(a"), "a regular expression that can be enforced"),
        (Grammar(kind="regex", definition="\u00e9"), "model's tokens satisfies, got none"),
        (Grammar(kind="json_object", definition="{}"), "empty for kind json_object"),
    ],
)
def test_other_grammars_are_refused(grammar: Grammar, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        matcher(grammar)


HOSTILE = {
    "nested repeats": "(a+)+$",
    "many ways": "(.*a){20}",
    "long memory": "(a|b)*a(a|b){30}",
    "large counts": "[a-z]{100000,200000}",
    "nested counts": "(([a-z]{1,50}){1,50}){1,50}",
}


@pytest.mark.parametrize("pattern", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pattern_is_followed_or_ended_with_an_error(pattern: str) -> None:
    state = matcher(Grammar(kind="regex", definition=pattern))
    draw = random.Random(2)
    message = None
    for _ in range(400):
        try:
            ids = [i for i in allowed_ids(state) if i not in TOKENIZER.stop_ids]
        except SlipstreamError as error:
            message = str(error)
            break
        if not ids:
            break
        state.push(draw.choice(ids))
    assert message is None or "grammar cannot be followed further" in message


def test_a_recursive_schema_is_followed_to_any_depth() -> None:
    deep = '{"value":1,"next":' * 40
    state = matcher(schema_grammar("tree"), TOKENIZER.encode(deep, parse_special=False))
    end = TOKENIZER.encode("null" + "}" * 40, parse_special=False)
    assert state.allowed_prefix([*end, STOP]) == [*end, STOP]
    assert state.allowed_prefix([*end[:-1], STOP]) == end[:-1]


def test_what_one_reply_explored_is_not_counted_against_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Drafts alone explore more states than the limit allows; picks and other replies never notice.
    monkeypatch.setattr(grammar_module, "MAX_LEXER_STATES", 300)
    grammars = Grammars(TOKENIZER, VOCAB_SIZE)
    grammar = Grammar(kind="regex", definition="[ab]*a[ab]{12}c")
    draw = random.Random(3)
    letters = TOKENIZER.encode("ab", parse_special=False) + TOKENIZER.encode(
        "a", parse_special=False
    )
    wild, tame = (grammars.matcher(grammar, TOKENIZER.stop_ids) for _ in range(2))
    for _ in range(400):
        wild.allowed_prefix([draw.choice(letters) for _ in range(12)])
    for state in (wild, tame):
        for token_id in TOKENIZER.encode("baabab", parse_special=False):
            assert token_id in allowed_ids(state)
            state.push(token_id)
    assert allowed_ids(wild) == allowed_ids(tame)


def test_threads_share_grammars_and_not_matchers() -> None:
    grammars = Grammars(TOKENIZER, VOCAB_SIZE)

    def run(seed: int) -> list[int]:
        name = list(SCHEMAS)[seed % 4]
        return walk(grammars.matcher(schema_grammar(name), TOKENIZER.stop_ids), random.Random(seed))

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, range(40)))
    assert together == [run(seed) for seed in range(40)]


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"slipstream\[server\]") as caught:
        matcher(OBJECT)
    assert (caught.value.param, caught.value.code) == ("grammar", "grammar_unavailable")


def test_the_package_is_not_loaded_before_a_grammar_is_asked_for() -> None:
    assert not hasattr(grammar_module, "llguidance")


def test_a_schema_may_be_given_as_a_value_and_order_of_properties_counts() -> None:
    grammar = Grammar(kind="json_schema", definition=PERSON)  # type: ignore[arg-type]
    assert json.loads(grammar.definition) == PERSON
    assert hash(SamplingParams(grammar=grammar)) == hash(SamplingParams(grammar=grammar))
    turned = {**PERSON, "properties": dict(reversed(PERSON["properties"].items()))}
    assert Grammar(kind="json_schema", definition=turned) != grammar  # type: ignore[arg-type]


def test_a_model_without_a_stop_token_cannot_end_a_grammar_and_says_so() -> None:
    class Endless:
        vocab_size, stop_ids, control_ids = VOCAB_SIZE, frozenset[int](), TOKENIZER.control_ids
        token_bytes, encode = TOKENIZER.token_bytes, TOKENIZER.encode

    with pytest.raises(RequestError, match="no stop token") as caught:
        Grammars(Endless(), VOCAB_SIZE).matcher(OBJECT, {5})
    assert caught.value.param == "grammar"
