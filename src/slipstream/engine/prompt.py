"""What a caller may give as a prompt, and how it becomes token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.engine.check import Tokenizer, too_long
from slipstream.errors import RequestError
from slipstream.types import SamplingParams

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages with more names for the chat template, e.g. tools."""

    messages: Sequence[Message]
    variables: Mapping[str, Any] = field(default_factory=dict)


# Raw text, token ids, or a conversation.
Prompt = str | Sequence[int] | Sequence[Message] | Conversation


class Template(Protocol):
    """What the engine asks of a model's chat template."""

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """Return the prompt text of a conversation, the assistant's turn opened."""


def prompt_ids(
    prompt: Prompt, tokenizer: Tokenizer, template: Template | None, *, max_len: int | None = None
) -> Iterable[int]:
    """Return a prompt's token ids; ids are passed on unchecked.

    Special tokens that a text spells are ordinary text; only a rendered template may use them.

    Args:
        max_len: positions of the context; a text that is certainly longer is not encoded.

    Raises:
        RequestError: it is none of the three kinds, or a conversation and there is no template, or
            it is too long.
    """

    def encode(text: str, *, parse_special: bool) -> list[int]:
        if max_len is not None and (least := tokenizer.has_more_ids(text, max_len - 1)):
            raise too_long(f"at least {least}", max_len)
        return tokenizer.encode(text, parse_special=parse_special)

    if isinstance(prompt, str):
        return encode(prompt, parse_special=False)
    if isinstance(prompt, Conversation):
        return encode(_rendered(prompt, template), parse_special=True)
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | Mapping):
        raise RequestError(
            f"prompt must be text, token ids or messages, got {type(prompt).__name__}",
            param="prompt",
        )
    items: list[Any] = list(prompt)
    if not any(isinstance(item, Mapping) for item in items):
        return items
    return encode(_rendered(Conversation(messages=items), template), parse_special=True)


def _rendered(conversation: Conversation, template: Template | None) -> str:
    """Return a conversation's text."""
    if template is None:
        raise RequestError(
            "messages need a chat template, and this model has none",
            param="messages",
            hint="give the prompt as text",
        )
    return template.render(conversation.messages, **conversation.variables)


def each_with_params(
    prompts: str | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Pair prompts with their params, one for all or one each.

    Raises:
        RequestError: there are not as many params as prompts.
    """
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
        raise RequestError(
            f"prompts must be text or a list of prompts, got {type(prompts).__name__}",
            param="prompt",
        )
    texts: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
    if texts and all(isinstance(text, Mapping) for text in texts):
        raise RequestError(
            "prompts must be a list of prompts, got the messages of one conversation",
            param="prompt",
            hint="a conversation is one prompt: pass [messages]",
        )
    if params is not None and not isinstance(params, SamplingParams | Sequence):
        raise RequestError(
            f"params must be SamplingParams or a list of them, got {type(params).__name__}",
            param="params",
        )
    each = list(params) if isinstance(params, Sequence) else [params] * len(texts)
    if len(each) != len(texts):
        raise RequestError(f"{len(texts)} prompts need as many params, got {len(each)}")
    return list(zip(texts, each, strict=True))
