"""Plain records that pass between the engine, its policy, the command line and a caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]
Verdict = Literal["enable", "decline", "fixed", "off", "unmeasured"]
KSetting = int | Literal["auto", "off"]

MAX_K = 15  # drafted tokens of a round; with the anchor, 16 rows share one weight read


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a caller asks of one reply.

    Attributes:
        max_tokens: tokens to generate at most, >= 1.
        temperature: 0 is greedy.
        seed: unsigned 64 bits; drawn and echoed when None.
        stop_token_ids: ids that end the reply besides the model's own; the id is part of the reply.
        ignore_eos: go on past the model's own stop ids.
        k: drafted tokens a round, "auto", "off", or None for the engine's own setting.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    k: KSetting | None = None


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


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one round adds to a stream; `reply` is set on the last chunk only.

    Attributes:
        text: text that became final in this round; never a broken character.
        token_ids: the round's emitted ids.
        accepted: how many of `token_ids`, from the front, were accepted draft tokens.
        reply: the whole reply, once finished.
    """

    text: str
    token_ids: list[int]
    accepted: int
    reply: Reply | None = field(default=None)


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one engine step adds to one request."""

    request_id: int
    chunk: Chunk
