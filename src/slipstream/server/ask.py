"""From a request's body to what the engine is asked: prompts and sampling parameters.

OpenAI's documented defaults hold where it documents one (temperature 1, 16 tokens of a text
completion); everything else has the engine's own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from slipstream.config import ServerConfig
from slipstream.engine.prompt import Conversation, Prompt
from slipstream.errors import RequestError
from slipstream.server.failures import HttpFailure
from slipstream.server.schema import (
    ROLES,
    UNSERVED,
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    Speculation,
    TextPart,
)
from slipstream.server.validation import nearest_key
from slipstream.types import Grammar, KSetting, SamplingParams

TEMPERATURE = 1.0  # OpenAI's default
COMPLETION_TOKENS = 16  # OpenAI's default of a text completion
MAX_PROMPTS = 64  # of one request, as many as it may have choices
TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "add_generation_prompt"})

# Fields that are handed on as they are, where they are given.
_PLAIN = (
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "bad_words",
    "bad_words_ids",
)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What one HTTP request asks of the engine.

    Attributes:
        ignored: keys of the body that nobody knows, to be named in the reply.
        names: what the body calls parameters that have another name in the engine.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    is_streamed: bool
    wants_usage: bool
    ignored: tuple[str, ...]
    names: Mapping[str, str]

    def renamed(self, error: RequestError) -> RequestError:
        """Return the engine's error in the words of the request's body."""
        name = self.names.get(error.param or "")
        if name is None:
            return error
        message = error.message
        if message.startswith(f"{error.param} "):
            message = name + message.removeprefix(str(error.param))
        return RequestError(message, param=name, code=error.code, hint=error.hint)


def chat_ask(body: ChatRequest, config: ServerConfig, template_roles: Collection[str] = ()) -> Ask:
    """Return what a chat request asks for.

    Args:
        template_roles: roles that the model's template asks for by name.

    Raises:
        RequestError: fields contradict each other, or cannot be served.
    """
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise _contradiction("max_tokens", "max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    given = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    values = _shared(body) | {
        "max_tokens": _limited(given, config.default_max_tokens, config, name),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    if body.prediction is not None:
        values["prediction"] = _text(body.prediction.content)
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for key in variables:
        if key in TEMPLATE_NAMES or not key.isidentifier():
            raise RequestError(
                f"chat_template_kwargs must be names other than {', '.join(sorted(TEMPLATE_NAMES))}"
                f", got {key}",
                param="chat_template_kwargs",
            )
    if body.tools and body.tool_choice != "none":
        variables["tools"] = [tool.model_dump(exclude_unset=True) for tool in body.tools]
    messages = [
        _message(message, f"messages.{index}", template_roles)
        for index, message in enumerate(body.messages)
    ]
    names = {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": name}
    return _ask(body, [Conversation(messages=messages, variables=variables)], values, names)


def completion_ask(body: CompletionRequest, config: ServerConfig) -> Ask:
    """Return what a text completion asks for.

    Raises:
        RequestError: fields contradict each other, or cannot be served.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            f"best_of must equal n, got {body.best_of} and {body.n or 1}", param="best_of"
        )
    values = _shared(body) | {
        "max_tokens": _limited(body.max_tokens, COMPLETION_TOKENS, config, "max_tokens"),
        "logprobs": body.logprobs,
    }
    prompt: Any = body.prompt
    is_list = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts = prompt if is_list else [prompt]
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"prompt must be at most {MAX_PROMPTS} prompts, got {len(prompts)}", param="prompt"
        )
    return _ask(body, prompts, values, {})


def check_model(name: str | None, served: str) -> None:
    """Refuse a request for a model that is not served.

    Raises:
        HttpFailure: it is not.
    """
    if name is not None and name != served:
        raise HttpFailure(
            404,
            f"the model {name!r:.200} is not served here",
            code="model_not_found",
            param="model",
            hint=f"the served model is {served!r}",
        )


def k_of(asked: Speculation | None) -> tuple[KSetting | None, int | None]:
    """Return the engine's k and max_k that a request's `speculation` stands for.

    Raises:
        RequestError: mode and k contradict each other.
    """
    if asked is None:
        return None, None
    if asked.mode == "fixed":
        if asked.k is None:
            raise RequestError("speculation.mode fixed needs a k", param="speculation.k")
        return asked.k, None
    if asked.mode == "off":
        if asked.k:
            raise RequestError(
                f"speculation.mode off drafts 0 tokens, got k {asked.k}", param="speculation.k"
            )
        return "off", None
    return "auto", asked.k


def _ask(
    body: SamplingFields,
    prompts: Sequence[Prompt],
    values: dict[str, Any],
    names: Mapping[str, str],
) -> Ask:
    wants_usage = False
    if body.stream_options is not None:
        if not body.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        wants_usage = body.stream_options.include_usage
    return Ask(
        prompts=prompts,
        params=SamplingParams(**values),
        is_streamed=bool(body.stream),
        wants_usage=wants_usage,
        ignored=_unknown(body),
        names={
            "k": "speculation.k",
            "max_k": "speculation.k",
            "grammar": "response_format" if body.guided_regex is None else "guided_regex",
            **names,
        },
    )


def _shared(body: SamplingFields) -> dict[str, Any]:
    """Return the sampling parameters that both kinds of request have."""
    values: dict[str, Any] = {
        name: getattr(body, name) for name in _PLAIN if getattr(body, name) is not None
    }
    values["temperature"] = TEMPERATURE if body.temperature is None else body.temperature
    values["k"], values["max_k"] = k_of(body.speculation)
    values["grammar"] = _grammar(body)
    if body.logit_bias is not None:
        values["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    return values


def _unknown(body: BaseModel) -> tuple[str, ...]:
    """Return the keys that nobody declared.

    Raises:
        RequestError: one of them looks like a misspelt field.
    """
    known = [name for name in type(body).model_fields if name not in UNSERVED]
    extra = tuple(body.model_extra or {})
    for key in extra:
        _check_spelling(key, key, known)
    return extra


def _check_spelling(key: str, param: str, known: Sequence[str]) -> None:
    """Refuse a key that looks like a misspelling of a known one.

    Raises:
        RequestError: it does.
    """
    match = nearest_key(key, known)
    if match is not None:
        raise RequestError(
            f"unknown key {param[:80]}",
            param=param[:80],
            code="unknown_parameter",
            hint=f"did you mean {match}?",
        )


def _limited(given: int | None, default: int, config: ServerConfig, name: str) -> int:
    """Return how many tokens a reply may have."""
    most = config.max_reply_tokens
    if given is None:
        return min(default, most) if most else default
    if most and given > most:
        raise RequestError(f"{name} must be at most {most} here, got {given}", param=name)
    if given < 1:
        raise RequestError(f"{name} must be >= 1, got {given}", param=name)
    return given


def _message(message: Message, where: str, template_roles: Collection[str]) -> dict[str, Any]:
    """Return a message as templates expect it: texts joined, "developer" the older "system".

    Raises:
        RequestError: its role is unknown, it says nothing, or one of its keys looks misspelt.
    """
    _check_role(message.role, f"{where}.role", [*ROLES, *sorted({*template_roles} - {*ROLES})])
    extra = message.model_extra or {}
    for key in extra:
        _check_spelling(key, f"{where}.{key}", list(Message.model_fields))
    calls = message.role == "assistant" and extra.get("tool_calls")
    if message.content is None and not calls:
        unless = " or tool_calls" if message.role == "assistant" else ""
        raise RequestError(
            f"{where}.content{unless} must be given for the role {message.role}",
            param=f"{where}.content",
            code="missing_parameter",
        )
    if message.content == []:
        raise RequestError(
            f"{where}.content must have at least 1 part, got 0", param=f"{where}.content"
        )
    turn = message.model_dump(exclude_unset=True)
    turn["content"] = _text(message.content)
    if message.role == "developer" and "developer" not in template_roles:
        turn["role"] = "system"
    return turn


def _check_role(role: str, param: str, known: Sequence[str]) -> None:
    """Refuse a role that neither the API nor the template knows.

    Raises:
        RequestError: they do not.
    """
    if role not in known:
        match = nearest_key(role, known)
        raise RequestError(
            f"{param} must be one of {', '.join(known)}, got {json.dumps(role[:40])}",
            param=param,
            code="invalid_value",
            hint=None if match is None else f"did you mean {match}?",
        )


def _text(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _grammar(body: SamplingFields) -> Grammar | None:
    """Return what the reply must look like."""
    form = body.response_format
    if body.guided_regex is not None:
        if form is not None and form.type != "text":
            raise _contradiction("guided_regex", "response_format")
        return Grammar(kind="regex", definition=body.guided_regex)
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar(kind="json_object")
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise RequestError(
            "response_format.type json_schema needs json_schema.schema",
            param="response_format.json_schema",
            code="missing_parameter",
        )
    return Grammar(kind="json_schema", definition=form.json_schema.schema_)  # type: ignore[arg-type]


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise RequestError(
            f"logit_bias must have token ids as keys, got {key[:40]!r}", param="logit_bias"
        )
    return int(key)


def _contradiction(one: str, other: str) -> RequestError:
    return RequestError(f"give either {one} or {other}, not both", param=one)
