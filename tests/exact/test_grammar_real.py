"""The default model under a schema: the reply is valid, and speculation never shows in it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

import slipstream
from slipstream.engine.engine import Engine
from slipstream.errors import LoadError
from slipstream.models.loading import resolve_model
from slipstream.types import Grammar, Reply, SamplingParams

pytestmark = pytest.mark.real_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "format": "email"},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 4},
    },
    "required": ["name", "age", "email", "hobbies"],
    "additionalProperties": False,
}
PROMPT = [{"role": "user", "content": "Describe a person as JSON with name, age, email, hobbies."}]
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "top_p": 0.95}


@cache
def engine() -> Engine:
    """Return an engine that drafts from n-grams."""
    try:
        model = resolve_model("smollm2-135m")
    except LoadError as error:
        pytest.skip(error.message)
    return slipstream.load(model, drafter="ngram", profile="off", max_model_len=1024)


def reply_of(grammar: Grammar | None, **fields: Any) -> Reply:
    """Return a reply to the prompt."""
    params = SamplingParams(**{"max_tokens": 160, "grammar": grammar, **fields})
    (reply,) = engine().generate([PROMPT], params)
    return reply


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_reply_under_a_schema_is_valid_whatever_is_drafted(how: dict[str, Any]) -> None:
    grammar = Grammar(kind="json_schema", definition=SCHEMA)  # type: ignore[arg-type]
    classic = reply_of(grammar, k="off", **how)
    assert classic.finish_reason == "stop"
    jsonschema.validate(json.loads(classic.text), SCHEMA)
    near = classic.text.replace("name", "title").replace("a", "e", 3)
    for k in (1, 4, 15, "auto"):
        for prediction in (None, classic.text, near):
            drafted = reply_of(grammar, k=k, prediction=prediction, **how)
            assert drafted.token_ids == classic.token_ids
            assert drafted.text == classic.text
    counts = reply_of(grammar, k=8, prediction=classic.text, **how).speculation.sources
    assert counts["prediction"]["accepted"] > len(classic.token_ids) // 2


def test_a_json_object_ends_valid_and_needs_no_prompt_for_it() -> None:
    grammar = Grammar(kind="json_object")
    ended = 0
    for seed in range(6):
        classic = reply_of(grammar, k="off", temperature=0.8, seed=seed)
        assert reply_of(grammar, k=6, temperature=0.8, seed=seed).token_ids == classic.token_ids
        if classic.finish_reason == "stop":
            ended += 1
            assert isinstance(json.loads(classic.text), dict)
    assert ended >= 2


def test_a_prediction_of_the_whole_reply_is_drafted_from() -> None:
    classic = reply_of(None, k="off", max_tokens=60)
    predicted = reply_of(None, k=6, max_tokens=60, prediction=classic.text)
    assert predicted.token_ids == classic.token_ids
    counts = predicted.speculation.sources["prediction"]
    assert counts["accepted"] > 40
