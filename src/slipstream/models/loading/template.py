"""Chat templates: messages to prompt text, in a sandbox with bounds.

The template comes with a downloaded file, so it is a program by a stranger. It runs in the closed
room of `sandbox.py`, and its time and output are bounded. The bounds stop accidents and simple
bombs; a template that doubles a text 40 times still takes memory.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError

from slipstream.errors import LoadError, RequestError
from slipstream.models.loading.sandbox import DEADLINE, Deadline, Sandbox

MAX_PROMPT_CHARS = 1 << 23  # some two million tokens, above any context served
MAX_RENDER_S = 2.0  # a chat of 100,000 messages takes 0.3 s
_FILE = "<template>"  # the file name that jinja gives to templates from a string


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        roles: those that it asks for by name.

    Args:
        source: jinja text, as in `tokenizer.chat_template`.
        tokens: names such as "bos_token" and "eos_token" with their texts, which templates use.

    Raises:
        LoadError: the source does not compile; the line is named.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self._tokens = dict(tokens or {})
        try:
            self._template = Sandbox().from_string(source)
            self.roles = _roles(Sandbox().parse(source))
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
            DEADLINE: Deadline(MAX_RENDER_S),
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
            names[DEADLINE].check()
            pieces.append(piece)
        return "".join(pieces)


def _roles(tree: nodes.Template) -> frozenset[str]:
    """Return the texts that a template compares a message's role with."""
    found: set[str] = set()
    for comparison in tree.find_all(nodes.Compare):
        sides = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        if any(_is_role(side) for side in sides):
            for side in sides:
                items = side.items if isinstance(side, nodes.List | nodes.Tuple) else [side]
                values = [item.value for item in items if isinstance(item, nodes.Const)]
                found.update(value for value in values if isinstance(value, str))
    return frozenset(found)


def _is_role(side: nodes.Node) -> bool:
    """Tell whether an expression is `role`, `message.role` or `message['role']`."""
    if isinstance(side, nodes.Getattr):
        return bool(side.attr == "role")
    if isinstance(side, nodes.Getitem):
        return isinstance(side.arg, nodes.Const) and side.arg.value == "role"
    return isinstance(side, nodes.Name) and side.name == "role"


def _fail(error: BaseException, what: str, code: str) -> NoReturn:
    """Raise the RequestError of a failed render, with the template's own line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == _FILE]
    where = f" (line {lines[-1]})" if lines else ""
    message = f"{what}{where}: {error}"
    raise RequestError(message, param="messages", code=code) from error
