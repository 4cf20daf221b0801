"""Grammars of replies: compiled to a matcher for each reply.

The work is llguidance's (guidance-ai): an Earley parser over a lexer of regular-expression
derivatives, so there is no backtracking that a pattern could blow up, and every step has a budget.
It was preferred to xgrammar, which pulls torch and Triton in. A JSON schema is enforced in full or
refused: a keyword that could not be kept, as "not" or "uniqueItems", is an error that says where it
stands, and so is one that only approximates.

Compiling takes a millisecond as a rule, half a second at worst. It is done where a request is
checked, off the engine's thread, and with the interpreter lock released. Nothing compiled is kept
for the next reply: copies of a matcher share what its lexer has explored, and so its limits, and
whether a reply exceeds them must not depend on others, nor on what was drafted.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from typing import Any, Protocol

from slipstream.engine.matcher import Matcher, error_line
from slipstream.engine.schema_place import find_place
from slipstream.errors import RequestError
from slipstream.types import Grammar

MAX_DEFINITION_BYTES = 1 << 18
# Each state takes 1 to 2 kB, and ordinary schemas take some hundred: 40 MB for a hostile pattern
# where llguidance's own limit means 500.
MAX_LEXER_STATES = 20_000
# One space, or a line break and its indentation: white space that may go on without end could be
# all of a reply.
JSON_OPTIONS = {
    "whitespace_pattern": r"[ ]|\n[ \t]{0,64}",
    "lenient": False,
    "coerce_one_of": False,
}


class Vocabulary(Protocol):
    """What a grammar asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""

    @property
    def stop_ids(self) -> Collection[int]:
        """Ids that end a reply; one at least."""

    @property
    def control_ids(self) -> Collection[int]:
        """Ids that add nothing to a text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the ids of a text."""


class Grammars:
    """Compiles grammars for one vocabulary. Threads may share it.

    Args:
        vocabulary: the model's tokenizer; looked at when the first grammar is compiled.
        vocab_size: length of a row of logits, no less than the vocabulary's.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokens: Any = None

    def matcher(self, grammar: Grammar, stop_ids: Collection[int]) -> Matcher:
        """Return a matcher at the beginning of a reply.

        Args:
            grammar: checked by `validate_sampling`.
            stop_ids: ids that end the reply, the model's own among them.

        Raises:
            RequestError: the grammar is wrong or not supported; `param` is "grammar".
        """
        definition = _checked(grammar)
        if not self._vocabulary.stop_ids:
            raise _refusal("absent for a model that has no stop token to end it with, got one")
        text = self._text(grammar.kind, definition)
        state = self._state(text)
        if state.is_error():
            message = error_line(state.get_error())
            if message.startswith("NoExtension"):
                raise _refusal("one that some text of the model's tokens satisfies, got none")
            if grammar.kind == "regex":
                raise _refusal(f"a regular expression that can be enforced, got {message}")
            place = find_place(json.loads(definition), message, self._refusal_of)
            raise _refusal(f"a JSON schema that can be enforced, got at {place}: {message}")
        end_id = min(self._vocabulary.stop_ids)
        return Matcher(state, ahead=self._state(text), end_id=end_id, stop_ids=stop_ids)

    def _text(self, kind: str, definition: str) -> str:
        """Return a grammar in llguidance's own words."""
        compiler = _llguidance().LLMatcher
        if kind == "regex":
            return str(compiler.grammar_from_regex(definition))
        try:
            return str(compiler.grammar_from_json_schema(definition, overrides=JSON_OPTIONS))
        except ValueError as error:
            raise _refusal(f"a JSON schema, got {error_line(str(error))}") from None

    def _state(self, text: str) -> Any:
        """Return the state at the beginning of a grammar, its first mask computed, or an error."""
        llguidance = _llguidance()
        limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        state = llguidance.LLMatcher(self._llguidance_tokens(), text, log_level=0, limits=limits)
        if not state.is_error():
            state.compute_logit_bias()  # what cannot even begin is found now
        return state

    def _refusal_of(self, schema: Any) -> str:
        """Return why a schema is refused, "" if it is not."""
        try:
            text = self._text("json_schema", json.dumps(schema))
            return error_line(self._state(text).get_error())
        except RequestError as error:
            return error.message

    def _llguidance_tokens(self) -> Any:
        """Return the vocabulary as llguidance wants it."""
        with self._lock:
            if self._tokens is None:
                llguidance = _llguidance()
                self._tokens = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_Tokens(self._vocabulary, self._vocab_size)),
                    n_vocab=self._vocab_size,
                    eos_token=sorted(self._vocabulary.stop_ids),
                    slices=llguidance.LLTokenizer.json_slices(),
                )
            return self._tokens


class _Tokens:
    """A vocabulary in the shape that llguidance's `TokenizerWrapper` reads."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._encode = vocabulary.encode
        self._num_begin = len(vocabulary.encode("", parse_special=False))  # put before any text
        self.eos_token_id = min(vocabulary.stop_ids)
        self.bos_token_id = None
        unknown = range(vocabulary.vocab_size, vocab_size)  # rows of padding have no token
        special = {*vocabulary.control_ids, *vocabulary.stop_ids, *unknown}
        self.special_token_ids = sorted(special)
        self.tokens = [
            f"<|{token_id}|>".encode() if token_id in special else vocabulary.token_bytes(token_id)
            for token_id in range(vocab_size)
        ]

    def __call__(self, text: bytes) -> list[int]:
        decoded = text.decode("utf-8", errors="replace")
        return self._encode(decoded, parse_special=False)[self._num_begin :]


def _checked(grammar: Grammar) -> str:
    """Return a grammar's definition, well-formed and of a size to be compiled."""
    definition = grammar.definition
    if grammar.kind == "json_object":
        if definition != "":
            raise _refusal("empty for kind json_object, got a definition")
        return '{"type": "object"}'
    try:
        num_bytes = len(definition.encode())
    except UnicodeEncodeError:
        raise _refusal("valid Unicode, got a lone surrogate") from None
    if num_bytes > MAX_DEFINITION_BYTES:
        raise _refusal(f"at most {MAX_DEFINITION_BYTES} bytes, got {num_bytes}")
    if grammar.kind == "json_schema":
        try:
            value = json.loads(definition, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise _refusal(f"a JSON schema as JSON text, got an error in it: {error}") from None
        if not isinstance(value, dict):
            raise _refusal(f"a JSON schema that is an object, got {definition:.80}")
    return definition


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _refusal(message: str) -> RequestError:
    return RequestError(f"grammar must be {message}", param="grammar", code="invalid_grammar")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            f"grammars need the package llguidance, which is not installed: {error}",
            param="grammar",
            code="grammar_unavailable",
            hint="pip install 'slipstream[server]'",
        ) from error
    return llguidance
