"""What clients may ask: OpenAI's request bodies, with this server's own fields beside them.

A field is in one of four classes, and none is dropped in silence. *Served* fields are declared
here. *Accepted* ones change nothing here and are declared with that meaning. What is declared only
to be *refused* (with `unserved`) would change the reply, and cannot be had. A key that nobody
declared is refused if it looks like a misspelt one, and otherwise named in the reply's
`ignored_fields`.

Ranges are the engine's business; here stand types alone, so that they are checked in one place.
Source: OpenAI's API reference, "Create chat completion" and "Create completion"; vLLM's names for
sampling fields that OpenAI lacks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slipstream.server.unserved import UnservedFields, hints_of, unserved

# Roles of OpenAI's API; a template may name more.
ROLES = ("system", "developer", "user", "assistant", "tool")
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    """An object whose keys are all known; values are taken as they are, not converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Open(BaseModel):
    """An object that may carry more keys."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(_Strict):
    """What a stream carries besides text."""

    include_usage: bool = Field(False, description="End with a chunk of token counts.")
    include_obfuscation: bool = Field(False, description="Accepted; nothing is padded.")


class Speculation(_Strict):
    """How far a request may speculate: it can only lower what the server allows."""

    mode: Literal["auto", "off", "fixed"] = Field(
        "auto",
        description="Let measurements decide, never draft, or draft `k` tokens in every round.",
    )
    k: int | None = Field(None, description="Drafted tokens: the most for auto, all for fixed.")


class Prediction(_Strict):
    """Text that the reply is expected to repeat; it is drafted from, and never trusted."""

    type: Literal["content"]
    content: str | list[TextPart]


class JsonSchemaFormat(_Strict):
    """A JSON schema that the reply must fit."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Accepted; a schema is always kept to.")


class ResponseFormat(_Strict):
    """What the reply must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Open):
    """One turn of a conversation; keys beyond these go to the model's template as they are."""

    role: str = Field(description=f"One of {', '.join(ROLES)}, or one that the template names.")
    content: str | list[TextPart] | None = None


class Function(_Open):
    """A function that the model may ask for."""

    name: str


class Tool(_Open):
    """A tool, as the model's template gets it."""

    type: Literal["function"]
    function: Function


class SamplingFields(UnservedFields, _Open):
    """Fields of chat and text completions alike."""

    model: str | None = Field(None, description="The served model's name, or nothing.")
    temperature: Number | None = Field(None, description="1 by default; 0 is greedy.")
    top_p: Number | None = None
    n: int | None = Field(None, description="Replies to one prompt.")
    seed: int | None = Field(None, description="Drawn and echoed where it is not given.")
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = Field(None, description="Bias by token id.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # What OpenAI's API lacks; names as in vLLM.
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    bad_words_ids: list[list[int]] | None = None
    guided_regex: str | None = Field(None, description="A pattern that the whole reply fits.")
    speculation: Speculation | None = None
    # Accepted, without effect on a reply.
    user: str | None = Field(None, description="Accepted; not kept.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted; not kept.")
    store: bool | None = Field(None, description="Accepted; nothing is stored.")
    service_tier: str | None = Field(None, description="Accepted; there is one tier.")
    safety_identifier: str | None = Field(None, description="Accepted; not kept.")
    prompt_cache_key: str | None = Field(
        None, description="Accepted; equal prompts share their KV without it."
    )


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = Field(None, description="Handed to the model's chat template.")
    tool_choice: Literal["auto", "none"] | None = Field(
        None, description="none hides the tools; calls cannot be forced."
    )
    parallel_tool_calls: bool | None = Field(None, description="Accepted; calls are text here.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="More names for the model's chat template."
    )
    prediction: Prediction | None = None
    modalities: list[Literal["text"]] | None = Field(None, description="Text alone.")
    # Refused: each would change the reply.
    audio: None = unserved()
    functions: None = unserved("use tools")
    function_call: None = unserved("use tools, and tool_choice")
    web_search_options: None = unserved()
    reasoning_effort: None = unserved("use chat_template_kwargs where the model's template has it")
    verbosity: None = unserved()


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]],
        Field(description="Text taken as it stands, token ids, or a list of either."),
    ]
    logprobs: int | None = Field(None, description="Alternatives to report for each token.")
    best_of: int | None = Field(None, description="Must equal n: every reply is returned.")
    # Refused: each would change the reply.
    echo: Literal[False] | None = unserved()
    suffix: Literal[""] | None = unserved()


Prediction.model_rebuild()
PARTS = f"list[{TextPart.__name__}]"  # how pydantic names this alternative of a text
UNSERVED = hints_of(ChatRequest, CompletionRequest)
