"""A conversation that is kept as long as it fits the model's context, oldest exchange first out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slipstream.errors import RequestError
from slipstream.types import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine

Message = dict[str, str]

_TOO_LONG = ("context_length_exceeded", "kv_capacity_exceeded")


class Conversation:
    """Messages so far.

    Args:
        engine: the model that replies.

    Attributes:
        system: the system message, "" for the template's own.
        exchanges: user's text and reply, oldest first.
    """

    def __init__(self, engine: Engine, system: str = "") -> None:
        self._engine = engine
        self.system = system
        self.exchanges: list[tuple[str, str]] = []

    def submit(self, text: str, params: SamplingParams, say: Callable[[str], None]) -> int:
        """Queue a reply to `text` and return the request's id.

        The oldest exchanges are forgotten until the rest leaves room for a reply: for all of
        `max_tokens`, or for a quarter of the context if that is less. Nothing is forgotten if it
        would not help.

        Args:
            say: told what was forgotten.

        Raises:
            RequestError: the request is wrong, or the text alone does not fit.
        """
        context = self._engine.target.max_model_len
        room = min(params.max_tokens, context // 4)
        for start in range(len(self.exchanges) + 1):
            shortest = start == len(self.exchanges)
            try:
                choices = self._engine.check(self._messages(start, text), params)
            except RequestError as error:
                if shortest or error.code not in _TOO_LONG:
                    raise
                continue
            if choices[0].sequence.prompt_len + room > context and not shortest:
                continue
            if start:
                del self.exchanges[:start]
                what = "exchange is" if start == 1 else f"{start} exchanges are"
                say(f"the context of {context} tokens is full: the oldest {what} forgotten")
            self._engine.queue(choices)
            return choices[0].id
        raise AssertionError("the shortest prompt is taken or refused")

    def _messages(self, start: int, text: str) -> list[Message]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.exchanges[start:]:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        return [*messages, {"role": "user", "content": text}]
