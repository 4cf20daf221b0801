"""From a request's rounds to what its caller gets: chunks, and the reply at the end."""

from __future__ import annotations

from typing import Any

from slipstream.engine.request import Request
from slipstream.engine.round import Round
from slipstream.types import Chunk, DetailedReply, Reply, SpeculationReport, Usage


def make_chunk(part: Round, reply: Reply | None) -> Chunk:
    """Return what a round adds; `reply` if it was the last."""
    request = part.request
    return Chunk(
        text=part.text,
        token_ids=part.emitted,
        accepted=min(part.accepted, len(part.emitted)),
        reply=reply,
        choice=request.choice,
        logprobs=part.logprobs if request.reports_logprobs else None,
        cached_tokens=request.sequence.num_cached,
        error=request.error,
    )


def last_chunk(request: Request, text: str, reply: Reply) -> Chunk:
    """Return the end of a request that no round ended; `text` is what was held back."""
    return Chunk(
        text=text,
        token_ids=[],
        accepted=0,
        reply=reply,
        choice=request.choice,
        logprobs=[] if request.reports_logprobs else None,
        cached_tokens=request.sequence.num_cached,
    )


def make_reply(request: Request, *, load_s: float) -> Reply:
    """Return a finished request's reply, with details only where they were asked for.

    Args:
        load_s: seconds that loading the model took.
    """
    assert request.finish_reason is not None
    sequence = request.sequence
    fields: dict[str, Any] = {
        "text": str(request.text),
        "token_ids": sequence.output_ids,
        "finish_reason": request.finish_reason,
        "seed": request.seed,
        "usage": Usage(prompt_tokens=sequence.prompt_len, completion_tokens=sequence.num_generated),
        "timing": request.stats.timing(load_s=load_s, completion_tokens=sequence.num_generated),
        "speculation": _speculation(request),
    }
    if request.num_choices == 1 and not request.reports_logprobs:
        return Reply(**fields)
    logprobs = request.logprobs if request.reports_logprobs else None
    return DetailedReply(**fields, choice=request.choice, logprobs=logprobs)


def _speculation(request: Request) -> SpeculationReport:
    reason = request.policy.reason
    if request.drafter_failure is not None:
        reason = f"{reason}; the drafter failed and was dropped ({request.drafter_failure})"
    return request.stats.report(
        policy=request.policy,
        reason=reason,
        requested_k=request.requested_k,
        drafter=request.drafter_name,
    )
