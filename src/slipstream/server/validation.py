"""From what is wrong with a body's form to an error in the server's own words.

Pydantic finds what is wrong; its messages speak of its classes, which no client knows, so they are
said anew: what is allowed, what was got, and the nearest name for what looks misspelt.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

from slipstream.errors import RequestError
from slipstream.server.schema import PARTS, UNSERVED

# What is allowed, by the kind of pydantic's problem.
_ALLOWED = {
    "string_type": "text",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "string_unicode": "Unicode text",
}
# The same by pydantic's name of an alternative, of a field that may be of several types.
_ALTERNATIVES = {
    "str": "text",
    PARTS: "a list of text parts",
    "list[str]": "a list of texts",
    "list[int]": "a list of token ids",
    "list[list[int]]": "a list of lists of token ids",
}


def validation_failure(problems: Sequence[Any], body: Any = None) -> RequestError:
    """Return the error of a body that does not have the right form.

    Args:
        problems: pydantic's, at least one; the first is reported, and what is wrong inside a
            message's parts before its not being text.
        body: what they were found in.
    """
    problem = problems[0]
    path = [str(part) for part in problem["loc"] if part != "body"]
    if problem["type"] == "json_invalid":
        why = dict(problem.get("ctx") or {}).get("error", "invalid JSON")
        at = "".join(f" at character {part}" for part in path if part.isdigit())
        return RequestError(
            f"the body must be JSON, got an error in it{at}: {why}", code="invalid_json"
        )
    where = _field(path)
    if problem["type"] == "string_unicode" and isinstance(_at(body, path), dict):
        return RequestError(
            f"keys of {where or 'the body'} must be Unicode text, got {_short(problem['input'])}",
            param=where or None,
            code="invalid_type",
        )
    if not where:
        return RequestError(
            "the body must be a JSON object sent as application/json",
            hint="check the header 'Content-Type: application/json'"
            if isinstance(problem.get("input"), bytes)
            else None,
            code="invalid_body",
        )
    if where in UNSERVED:
        return _unserved(where, problem)
    if len(path) > len(where.split(".")):
        return _several(where, problems)
    return _single(where, problem)


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the known key that another looks like a misspelling of."""
    match = difflib.get_close_matches(key[:64], known, n=1, cutoff=0.8)
    return match[0] if match else None


def _unserved(name: str, problem: Any) -> RequestError:
    got = f", got {_short(problem.get('input'))}"
    return RequestError(
        f"{name} is not served here{got}",
        hint=UNSERVED[name],
        param=name,
        code="unsupported_parameter",
    )


def _single(where: str, problem: Any) -> RequestError:
    """Return what is wrong with a field that is of one type."""
    kind, value = problem["type"], problem.get("input")
    name = where.rpartition(".")[2]
    if kind == "extra_forbidden":
        return RequestError(f"unknown key {where}", param=where, code="unknown_parameter")
    if kind == "missing":
        key = nearest_key(name, list(value)) if isinstance(value, dict) else None
        return RequestError(
            f"{where} must be given" + ("" if key is None else f", got the key {key}"),
            hint=None if key is None else f"did you mean {name}?",
            param=where,
            code="missing_parameter",
        )
    hint = None
    if kind == "literal_error":
        values = re.findall(r"'([^']*)'", str(problem["ctx"]["expected"]))
        allowed = f'"{values[0]}"' if len(values) == 1 else f"one of {', '.join(values)}"
        match = nearest_key(value, values) if isinstance(value, str) else None
        hint = None if match is None else f"did you mean {match}?"
    elif kind in _ALLOWED:
        allowed = _ALLOWED[kind]
    else:  # none that a body of ours is known to meet
        allowed = f"of the documented form ({problem['msg']})"
    return RequestError(
        f"{where} must be {allowed}, got {_short(value)}",
        hint=hint,
        param=where,
        code="invalid_type",
    )


def _several(where: str, problems: Sequence[Any]) -> RequestError:
    """Return what is wrong with a field that may be of several types."""
    depth = len(where.split("."))
    allowed: dict[str, None] = {}
    for problem in problems:
        path = [str(part) for part in problem["loc"] if part != "body"]
        if _field(path) != where or len(path) <= depth:
            continue
        rest = path[depth:]
        if rest[0] == PARTS and len(rest) > 1:
            return _part(where, ".".join([where, *rest[1:]]), problem)
        allowed[_ALTERNATIVES.get(rest[0], rest[0])] = None
    *most, last = allowed
    either = f"{', '.join(most)} or {last}" if most else last
    return RequestError(
        f"{where} must be {either}, got {_short(problems[0].get('input'))}",
        param=where,
        code="invalid_type",
    )


def _part(field: str, where: str, problem: Any) -> RequestError:
    """Return what is wrong with a part of a text."""
    value = problem.get("input")
    if problem["type"] == "literal_error":
        got = value[:40] if isinstance(value, str) else _short(value)
        return RequestError(
            f"{field}: only text parts are served, got {got}",
            param=field,
            code="unsupported_parameter",
        )
    return _single(where, problem)


def _field(path: list[str]) -> str:
    """Return where a problem is, e.g. messages.0.role, down to a choice of types."""
    end = next(
        (i for i, part in enumerate(path) if i and (part in _ALTERNATIVES or "[" in part)),
        len(path),
    )
    return ".".join(path[:end])


def _at(body: Any, path: list[str]) -> Any:
    """Return what stands at a place of the body, None if nothing does."""
    for part in path:
        if isinstance(body, list) and part.isdigit() and int(part) < len(body):
            body = body[int(part)]
        else:
            body = body.get(part) if isinstance(body, dict) else None
    return body


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, default=lambda item: type(item).__name__)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
