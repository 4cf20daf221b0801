"""The error tree: one base, one message format."""

from __future__ import annotations

import inspect
import re

import pytest

from slipstream import errors
from slipstream.errors import LoadError, MismatchError, RequestError, SlipstreamError


def _classes() -> dict[str, type]:
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: item for name, item in members if item.__module__ == errors.__name__}


def test_tree_in_the_docstring_matches_the_classes() -> None:
    assert errors.__doc__ is not None
    parents: dict[str, str | None] = {}
    path: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"^(    [│├└─ ]*)([A-Z]\w+Error)\b", line)
        if not match:
            continue
        depth, name = len(match[1]), match[2]
        path = [item for item in path if item[0] < depth]
        parents[name] = path[-1][1] if path else None
        path.append((depth, name))
    actual = {
        name: None if item is SlipstreamError else item.__bases__[0].__name__
        for name, item in _classes().items()
    }
    assert parents == actual


@pytest.mark.parametrize("name", sorted(_classes()))
def test_every_error_is_caught_by_the_base(name: str) -> None:
    assert issubclass(_classes()[name], SlipstreamError)


def test_hint_stands_on_a_line_of_its_own() -> None:
    error = LoadError("file is truncated", hint="pull it again")
    assert str(error) == "file is truncated\nhint: pull it again"
    assert (error.message, error.hint) == ("file is truncated", "pull it again")


def test_message_stands_alone_without_a_hint() -> None:
    assert str(MismatchError("vocabulary of 10 and 12")) == "vocabulary of 10 and 12"


def test_request_error_names_field_and_code() -> None:
    error = RequestError("prompt of 9 tokens", param="prompt", code="context_length_exceeded")
    assert (error.param, error.code, error.hint) == ("prompt", "context_length_exceeded", None)
