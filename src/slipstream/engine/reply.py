"""From a finished request to the reply that its caller gets."""

from __future__ import annotations

from slipstream.engine.request import Request
from slipstream.types import Reply, SpeculationReport, Usage


def make_reply(request: Request, *, load_s: float) -> Reply:
    """Return a finished request's reply.

    Args:
        load_s: seconds that loading the model took.
    """
    assert request.finish_reason is not None
    sequence = request.sequence
    return Reply(
        text=str(request.text),
        token_ids=sequence.output_ids,
        finish_reason=request.finish_reason,
        seed=request.seed,
        usage=Usage(prompt_tokens=sequence.prompt_len, completion_tokens=sequence.num_generated),
        timing=request.stats.timing(load_s=load_s, completion_tokens=sequence.num_generated),
        speculation=_speculation(request),
    )


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
