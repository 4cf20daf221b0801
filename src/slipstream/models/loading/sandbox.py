"""The closed room in which a model file's chat template runs.

jinja's immutable sandbox keeps the template from private attributes and from changing what it is
given. On top of that: an unsafe attribute is refused on sight, nothing is evaluated while the
template compiles, every loop looks at the clock, and products and powers are bounded. The functions
and filters are those for which chat templates are written (`apply_chat_template` of
`transformers`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Template as Tree
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import RequestError

DEADLINE = "_render_deadline"  # the variable that carries a render's end; no template uses it
_MAX_PRODUCT = 1 << 20  # longest text or list that a `*` may make, and largest power's bits
_CLOCK_STRIDE = 256  # loop steps between looks at the clock


class Deadline:
    """The end of one render's time.

    Args:
        limit_s: seconds from now.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._end_s = time.monotonic() + limit_s

    def check(self) -> None:
        """Raise a RequestError once the time is over."""
        if time.monotonic() > self._end_s:
            raise RequestError(
                f"the chat template must render within {self._limit_s} s",
                param="messages",
                code="template_bound",
            )


class _MeteredLoop:
    """What a `for` runs over, looking at the clock now and then."""

    def __init__(self, items: Any, deadline: Deadline) -> None:
        self._items = items
        self._deadline = deadline

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for index, item in enumerate(self._items):
            if index % _CLOCK_STRIDE == 0:
                self._deadline.check()
            yield item


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's part for trainers: here just its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates; a render must be given `DEADLINE`."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer would run constant filters while compiling
            extensions=[loopcontrols, _Generation],
        )
        self.filters["tojson"] = _to_json
        self.filters["metered"] = _MeteredLoop
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> Tree:
        """Parse, and meter every loop."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            deadline = nodes.Name(DEADLINE, "load", lineno=loop.lineno)
            loop.iter = nodes.Filter(
                loop.iter, "metered", [deadline], [], None, None, lineno=loop.lineno
            )
        return tree

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an unsafe attribute on sight, even where its value would only be printed."""
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is unsafe")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse a product or power that would fill the memory."""
        if operator == "**":
            integers = isinstance(left, int) and isinstance(right, int)
            if integers and abs(right) * left.bit_length() > _MAX_PRODUCT:
                raise OverflowError(f"a power of {right} is too large")
        elif isinstance(left, Sequence) or isinstance(right, Sequence):
            items, times = (left, right) if isinstance(left, Sequence) else (right, left)
            if len(items) * times > _MAX_PRODUCT:
                raise OverflowError(f"a text or list of {len(items) * times} items is too long")
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without jinja's HTML escapes, which would change the prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    """`raise_exception` of the template."""
    raise RequestError(str(message), param="messages", code="template_refused")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
