"""A vocabulary that can spell JSON, schemas, and matchers over them, for tests of grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.engine.grammar import Grammars
from slipstream.engine.matcher import Matcher
from slipstream.models.loading.detokenizer import Detokenizer
from slipstream.types import Grammar

STOP, OTHER_STOP, CONTROL = 96, 97, 98
_WORDS = (
    '{" "} {} [] [{ }] ": ":" ", "," }, ], " "name" name "age" "tags" true false null tr ue '
    "10 25 a b an in er th he is ab cd abc -1 .5 e1 0. \\n \\u u00 00 "
)
_TOKENS = [*map(chr, range(32, 127)), "\n", "<stop>", "<other>", "<control>"]
_TOKENS += [word for word in _WORDS.split(" ") if len(word) > 1]
_TOKENS += [' "', '": ', '", "', "\n  ", "\n    ", ", ", '": "', '{"name": "']
VOCAB_SIZE = 160  # rows beyond the tokens are padding, as models have it


class JsonTokenizer:
    """Printable ASCII, and longer pieces of JSON; a text is cut at the longest piece each time."""

    vocab_size = len(_TOKENS)
    stop_ids = frozenset((STOP, OTHER_STOP))
    control_ids = frozenset((STOP, OTHER_STOP, CONTROL))

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        ids = []
        while text:
            fits = [
                (len(token), token_id)
                for token_id, token in enumerate(_TOKENS)
                if token_id not in self.control_ids and text.startswith(token)
            ]
            length, token_id = max(fits, default=(1, None))
            if token_id is not None:
                ids.append(token_id)
            text = text[length:]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self.control_ids or token_id >= self.vocab_size:
            return b""
        return _TOKENS[token_id].encode()

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.token_bytes)


TOKENIZER = JsonTokenizer()
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 7]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": ["number", "null"]},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
FIXED: dict[str, Any] = {"const": {"name": "Ada", "tags": ["red", "green"], "age": 36}}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "tree": TREE,
    "fixed": FIXED,
    "pattern": {"type": "string", "pattern": "^(ab|cd)+[0-9]{2,4}$"},
    "number": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 100, "maximum": 9999},
    "date": {"type": "string", "format": "date"},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "integer", "maximum": 12, "minimum": -12}],
        "items": False,
        "minItems": 2,
    },
    "extra": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "both": {
        "allOf": [
            {"type": "object", "properties": {"a": {"const": "able"}}, "required": ["a"]},
            {"properties": {"a": {"type": "string"}, "b": {"enum": [True, None]}}},
            {"required": ["b"]},
        ],
    },
}


def schema_grammar(name: str) -> Grammar:
    """Return the grammar of one of SCHEMAS."""
    return Grammar(kind="json_schema", definition=SCHEMAS[name])


def matcher(grammar: Grammar, tokens: Sequence[int] = (), **options: Any) -> Matcher:
    """Return a new matcher after some tokens."""
    found = Grammars(TOKENIZER, VOCAB_SIZE).matcher(
        grammar, options.get("stop_ids", TOKENIZER.stop_ids)
    )
    for token_id in tokens:
        found.push(token_id)
    return found


def text_of(token_ids: Sequence[int]) -> str:
    """Return the text of some ids."""
    return b"".join(map(TOKENIZER.token_bytes, token_ids)).decode()
