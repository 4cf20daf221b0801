"""From an error to a status and OpenAI's error object: one place for all routes.

    400  the request is wrong, and nothing of it was run
    401  the key is missing or wrong
    404  no such model or path
    408  the client took too long to send its request
    413  the body is too long
    429  the queue is full; Retry-After says when to come back
    503  the server is stopping
    504  the request took longer than it may

Anything else that a request ends with is a fault of the machine or of our own: 500.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slipstream.errors import RequestError, SlipstreamError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class HttpFailure(SlipstreamError):
    """What ends a request with a status of its own.

    Args:
        status: HTTP status, 400 to 599.
        headers: sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        hint: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def status_of(error: SlipstreamError) -> int:
    """Return the HTTP status that an error is answered with."""
    if isinstance(error, HttpFailure):
        return error.status
    return 400 if isinstance(error, RequestError) else 500


def headers_of(error: SlipstreamError) -> dict[str, str]:
    """Return the headers that go with it."""
    return error.headers if isinstance(error, HttpFailure) else {}


def error_object(error: SlipstreamError) -> dict[str, Any]:
    """Return OpenAI's error object for an error."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    hint = f" (hint: {error.hint})" if error.hint else ""
    code = getattr(error, "code", None)
    return {
        "error": {
            "message": error.message + hint,
            "type": kind,
            "param": getattr(error, "param", None),
            "code": code or ("invalid_value" if isinstance(error, RequestError) else None),
        }
    }


def error_body(error: SlipstreamError) -> bytes:
    """Return it as JSON."""
    return json.dumps(error_object(error)).encode()
