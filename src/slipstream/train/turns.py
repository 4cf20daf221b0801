"""A model's chat template as the tokens that come between its turns.

A model that writes both sides of a conversation is not asked to write the markers between them:
they are put there, as a server would. They are found by rendering a conversation of placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import LoadError
from slipstream.models.loading import ModelFile

_MARKS = ("placeholderone", "placeholdertwo", "placeholderthree")


@dataclass(frozen=True, kw_only=True)
class TurnScript:
    """What stands between turns.

    Attributes:
        to_reply: ids from the end of the user's text to the beginning of the reply's.
        to_user: ids from the end of the reply's text to the beginning of the user's next.
        stop_ids: ids with which a turn ends; the first of `to_reply` and `to_user` among them.
        banned_ids: control tokens, which no turn may hold.
    """

    to_reply: tuple[int, ...]
    to_user: tuple[int, ...]
    stop_ids: frozenset[int]
    banned_ids: tuple[int, ...]


def read_script(file: ModelFile) -> TurnScript:
    """Find a model's turn markers.

    Raises:
        LoadError: it has no chat template, or one that hides what it is given.
    """
    messages = [
        {"role": role, "content": mark}
        for role, mark in zip(("user", "assistant", "user"), _MARKS, strict=True)
    ]
    text = _render(file, messages)
    pieces = []
    for mark in _MARKS:
        piece, found, text = text.partition(mark)
        if not found:
            raise LoadError("the chat template does not show every message as it is")
        pieces.append(_ids(file, piece))
    to_reply, to_user = pieces[1], pieces[2]
    if not to_reply or not to_user:
        raise LoadError("the chat template puts nothing between two turns")
    stop_ids = file.tokenizer.stop_ids | {to_reply[0], to_user[0]}
    banned = [
        token
        for token in range(file.tokenizer.vocab_size)
        if token not in stop_ids and not file.tokenizer.token_bytes(token)
    ]
    return TurnScript(
        to_reply=to_reply, to_user=to_user, stop_ids=stop_ids, banned_ids=tuple(banned)
    )


def user_frame(file: ModelFile, system: str = "") -> tuple[str, str]:
    """Return what a template puts before and after the user's text, the reply's turn opened."""
    first = [{"role": "system", "content": system}] if system else []
    text = _render(file, [*first, {"role": "user", "content": _MARKS[0]}])
    before, _, after = text.partition(_MARKS[0])
    return before, after


def whole_turn(file: ModelFile, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ids of a conversation with the reply's turn opened."""
    return file.tokenizer.encode(_render(file, messages), parse_special=True)


def _render(file: ModelFile, messages: Sequence[Mapping[str, Any]]) -> str:
    if file.template is None:
        raise LoadError(
            "the model has no chat template, and is asked to converse",
            hint="use an instruction-tuned model",
        )
    return file.template.render(messages)


def _ids(file: ModelFile, text: str) -> tuple[int, ...]:
    """Return the ids of a piece from inside a conversation."""
    ids = file.tokenizer.encode(text, parse_special=True)
    is_first = file.tokenizer.adds_bos and ids[:1] == [file.tokenizer.bos_id]
    return tuple(ids[1:] if is_first else ids)
