"""Chat templates: messages to prompt text, in a sandbox with bounds.

The template comes with a downloaded file, so it is a program by a stranger. It runs in jinja's
immutable sandbox (no private attributes, no mutation of what it is given) with the names and
whitespace rules for which templates are written (`apply_chat_template` of `transformers`), nothing
is evaluated at compile time, and loops, products, output and time are bounded. The bounds stop
accidents and simple bombs; a template that doubles a text 40 times still takes memory.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Template as Tree
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import LoadError, RequestError

MAX_PROMPT_CHARS = 1 << 23  # some two million tokens, above any context served
MAX_RENDER_S = 2.0  # a chat of 100,000 messages takes 0.3 s
_MAX_PRODUCT = 1 << 20  # longest text or list that a `*` may make, and largest power's bits
_CLOCK_STRIDE = 256  # loop steps between looks at the clock
_DEADLINE = "_render_deadline"  # a name that no template uses
_FILE = "<template>"  # the file name that jinja gives to templates from a string


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: jinja text, as in `tokenizer.chat_template`.
        tokens: names such as "bos_token" and "eos_token" with their texts, which templates use.

    Raises:
        LoadError: the source does not compile; the line is named.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self._tokens = dict(tokens or {})
        try:
            self._template = _Environment().from_string(source)
        except TemplateSyntaxError as error:
            raise LoadError(
                f"chat template, line {error.lineno}: {error.message}", hint="use --raw"
            ) from error
        except (TemplateError, RecursionError, ValueError, OverflowError) as error:
            raise LoadError(f"chat template: {error}", hint="use --raw") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: mappings with at least "role" and, mostly, "content", oldest first.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: more names for the template, e.g. tools.

        Raises:
            RequestError: no messages, a message without a role, or the template refuses the
                conversation, fails on it (the line is named) or exceeds a bound.
        """
        if not messages:
            raise RequestError("messages must not be empty", param="messages", code="no_messages")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(
                    f"message {index} must have a role", param="messages", code="invalid_message"
                )
        names: dict[str, Any] = {"tools": None, "documents": None} | self._tokens | variables
        names |= {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            _DEADLINE: _Deadline(),
        }
        try:
            return self._join(names)
        except RequestError:
            raise
        except SecurityError as error:
            _fail(error, "the chat template reaches outside its sandbox", "template_unsafe")
        except MemoryError as error:
            _fail(error, "the chat template takes too much memory", "template_bound")
        except Exception as error:  # whatever a stranger's program raises
            _fail(error, "the chat template cannot render these messages", "template_failed")

    def _join(self, names: dict[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(names):
            num_chars += len(piece)
            if num_chars > MAX_PROMPT_CHARS:
                raise RequestError(
                    f"the prompt must have at most {MAX_PROMPT_CHARS} characters",
                    param="messages",
                    code="template_bound",
                )
            names[_DEADLINE].check()
            pieces.append(piece)
        return "".join(pieces)


class _Deadline:
    """The end of one render's time."""

    def __init__(self) -> None:
        self._end_s = time.monotonic() + MAX_RENDER_S

    def check(self) -> None:
        if time.monotonic() > self._end_s:
            raise RequestError(
                f"the chat template must render within {MAX_RENDER_S} s",
                param="messages",
                code="template_bound",
            )


class _MeteredLoop:
    """What a `for` runs over, looking at the clock now and then."""

    def __init__(self, items: Any, deadline: _Deadline) -> None:
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


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with the functions and filters that chat templates expect."""

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
            deadline = nodes.Name(_DEADLINE, "load", lineno=loop.lineno)
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


def _fail(error: BaseException, what: str, code: str) -> NoReturn:
    """Raise the RequestError of a failed render, with the template's own line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == _FILE]
    where = f" (line {lines[-1]})" if lines else ""
    message = f"{what}{where}: {error}"
    raise RequestError(message, param="messages", code=code) from error
