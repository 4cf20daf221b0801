"""Every error that Slipstream raises on purpose.

A caller who catches `SlipstreamError` catches them all; the subclasses say whose fault it is::

    SlipstreamError
    ├── ConfigError          a setting is out of range, unknown or contradicts another
    ├── LoadError            a model file cannot be served: missing, truncated, unsupported
    │   └── MismatchError    two files do not belong together (target and drafter)
    ├── CapacityError        no memory, page or context is left for the work asked
    └── RequestError         one request is wrong; the engine goes on (param, code)

A message says what is wrong, what is allowed and what was got: "k must be in [0, 15], got 20".
`hint`, where there is one, says what to do about it.
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of all deliberate errors.

    Args:
        message: what is wrong, the allowed, the got.
        hint: what the user can do; printed on a `hint:` line of its own.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(SlipstreamError):
    """A setting is out of range, unknown, or contradicts another."""


class LoadError(SlipstreamError):
    """A model file is missing, truncated, corrupt or of an unsupported kind."""


class MismatchError(LoadError):
    """Two files do not belong together; both values are named."""


class CapacityError(SlipstreamError):
    """Memory, KV pages or context do not suffice for the work asked."""


class RequestError(SlipstreamError):
    """One request is wrong; nothing of it was run.

    Args:
        message: what is wrong, the allowed, the got.
        param: name of the offending request field, if one is to blame.
        code: short stable identifier, e.g. "context_length_exceeded".
        hint: what the caller can do.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.code = code
