"""What is answered, described for the OpenAPI document; tests hold replies against it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length"]


class _Described(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Described):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(_Described):
    """OpenAI's error object."""

    error: ErrorDetail


class PromptDetails(_Described):
    """Prompt tokens whose KV was there already."""

    cached_tokens: int


class CompletionDetails(_Described):
    """What became of a prediction's tokens; only where one was given."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageReply(BaseModel):
    """Token counts of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class ChoiceStatistics(_Described):
    """How one choice came about."""

    index: int
    seed: int
    timing: dict[str, float]
    speculation: dict[str, Any]


class Statistics(_Described):
    """This server's own block."""

    choices: list[ChoiceStatistics]
    ignored_fields: list[str]


class AssistantMessage(_Described):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Described):
    """One reply."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Finish


class ChatReply(_Described):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    slipstream: Statistics


class TextChoice(_Described):
    """One reply."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Finish


class CompletionReply(_Described):
    """A whole text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageReply
    slipstream: Statistics


class ModelReply(_Described):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Described):
    """All served models: one."""

    object: Literal["list"]
    data: list[ModelReply]


class Health(_Described):
    """Whether the server can answer, and what it answers with."""

    status: Literal["ok", "stopping", "failed"]
    model: str
    drafter: str
    drafter_failure: str | None
    running_or_waiting: int
    kv_pages_used: int
    kv_pages: int


class Version(_Described):
    """The program."""

    version: str
