"""Plain records that pass between the engine, its policy, the command line and a caller."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from slipstream.errors import SlipstreamError

FinishReason = Literal["stop", "length", "cancelled", "error"]
Verdict = Literal["enable", "decline", "fixed", "off", "unmeasured"]
KSetting = int | Literal["auto", "off"]
GrammarKind = Literal["json_object", "json_schema", "regex"]

MAX_K = 15  # drafted tokens of a round; with the anchor, 16 rows share one weight read


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """What a whole reply must look like.

    Attributes:
        kind: "json_object" (any JSON object), "json_schema" or "regex".
        definition: the schema, as JSON text or as the value itself, which becomes text; or the
            pattern. Empty for a JSON object.
    """

    kind: GrammarKind
    definition: str = ""

    def __post_init__(self) -> None:
        value: Any = self.definition
        if isinstance(value, Mapping | bool):
            # What JSON cannot say stays as it is, to be refused by whoever checks the request.
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                value = json.dumps(value, allow_nan=False)
        object.__setattr__(self, "definition", value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a caller asks of one reply.

    Nothing is checked here: the engine refuses a request whose parameters are wrong. Lists become
    tuples and mappings tuples of pairs, so that parameters can be hashed and shared.

    Attributes:
        max_tokens: tokens to generate at most, >= 1.
        temperature: divides the logits, in [0, 100]; 0 is greedy.
        seed: unsigned 64 bits; drawn and echoed when None.
        stop_token_ids: ids that end the reply besides the model's own; the id is part of the reply.
        ignore_eos: go on past the model's own stop ids.
        k: drafted tokens a round, "auto", "off", or None for the engine's own setting.
        max_k: most drafted tokens a round, whatever k is; None leaves it to the engine.
        top_p: keep the likeliest tokens that together hold this share, in (0, 1]; 1 keeps all.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        min_p: keep tokens at least this times as likely as the likeliest, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt
            or reply hold, in (0, 100]; 1 changes nothing.
        presence_penalty: subtracted from the logits of tokens that the reply holds, in [-2, 2].
        frequency_penalty: the same once per occurrence in the reply, in [-2, 2].
        logit_bias: what to add to the logits of some ids, each in [-100, 100].
        bad_words_ids: id sequences that the text, prompt included, never completes.
        bad_words: the same as texts.
        min_tokens: stop ids are not chosen before the reply has this many tokens.
        stop: texts that end the reply, at most 16, or one text; it is not part of the reply.
        n: replies to one prompt, in [1, 64]; each has noise of its own under the same seed.
        logprobs: alternatives to report with each token's log-probability, in [0, 20]; None
            reports nothing.
        grammar: what the reply must look like; a reply that ends by itself always does.
        prediction: text that the reply is expected to resemble: drafts come from it, so it changes
            the clock and never the reply.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    k: KSetting | None = None
    max_k: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    grammar: Grammar | None = None
    prediction: str | None = None

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "logit_bias", "bad_words_ids", "bad_words", "stop"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))


def _frozen(value: Any) -> Any:
    """Return lists as tuples and mappings as tuples of pairs, at any depth."""
    if isinstance(value, Mapping):
        return tuple((key, item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return value


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of one reply."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one reply; decode runs from the first token to the last."""

    load_s: float
    prefill_s: float
    decode_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class SpeculationReport:
    """What speculation did in one reply; the fields and their order are the JSON contract."""

    mode: str
    drafter: str
    verdict: Verdict
    reason: str
    requested_k: KSetting
    mean_drafted: float | None
    rounds: int
    classic_rounds: int
    drafted: int
    accepted: int
    acceptance_length: float | None
    k_histogram: dict[str, int]
    classic_ms: float | None
    verify_ms: float | None
    draft_ms: float | None
    overhead_ms: float | None
    predicted_speedup: float | None
    sources: dict[str, dict[str, int]]
    undrafted: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One finished generation; `dataclasses.asdict` of it is the `--json` object."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    seed: int
    usage: Usage
    timing: Timing
    speculation: SpeculationReport


class TokenLogprobs(NamedTuple):
    """Raw log-probabilities at one position, before penalties and temperature.

    Attributes:
        logprob: of the chosen token.
        top: (id, logprob) of the likeliest tokens, likeliest first, the lowest id first among
            equals.
        rank: the chosen token's place in that order, 1 for the first.
    """

    logprob: float
    top: list[tuple[int, float]]
    rank: int


@dataclass(frozen=True, kw_only=True)
class DetailedReply(Reply):
    """A reply to a request that asked for several choices or for logprobs.

    Attributes:
        choice: which of the choices it is, from 0.
        logprobs: one entry per token of `token_ids`; None if they were not asked for.
    """

    choice: int
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one round adds to a stream; `reply` is set on a choice's last chunk only.

    A stop string ends the text before it and the ids with the token that completed it, so the ids
    may spell more than the text.

    Attributes:
        text: text that became final in this round; never a broken character, never the beginning
            of a stop string.
        token_ids: the round's emitted ids.
        accepted: how many of `token_ids`, from the front, were accepted draft tokens.
        reply: the whole reply, once finished.
        choice: which of the request's choices it belongs to, from 0.
        logprobs: one entry per id, None if they were not asked for.
        cached_tokens: prompt tokens whose KV was there already.
        error: why the request could not go on; its reply ends with finish_reason "error".
    """

    text: str
    token_ids: list[int]
    accepted: int
    reply: Reply | None = field(default=None)
    choice: int = 0
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    error: SlipstreamError | None = None


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one engine step adds to one request."""

    request_id: int
    chunk: Chunk
