"""The phases of a step, in order; each fills in the rounds of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.engine.accept import accept_drafts, cut
from slipstream.engine.pages import PagePool
from slipstream.engine.round import Round, pack
from slipstream.engine.target import Target
from slipstream.policy.base import RoundOutcome

Clock = Callable[[], float]


def peek(batch: Sequence[Round], clock: Clock) -> None:
    """Ask drafters that cost nothing, before the policy decides."""
    for part in batch:
        drafter = part.request.drafter
        if drafter is not None and drafter.free and part.ceiling > 0:
            began = clock()
            part.proposed = drafter.propose(part.request.sequence.token_ids, part.ceiling)
            part.draft_s += clock() - began


def choose(batch: Sequence[Round]) -> None:
    """Let each request's policy size its round."""
    for part in batch:
        if not part.is_prefill:
            part.k = part.request.policy.choose(part.view()).k


def propose(batch: Sequence[Round], clock: Clock, *, vocab_size: int) -> None:
    """Draft at most k tokens; a drafter that offers fewer makes the round narrower."""
    for part in batch:
        drafter = part.request.drafter
        if drafter is None or part.k == 0:
            continue
        if not drafter.free:
            began = clock()
            part.proposed = drafter.propose(part.request.sequence.token_ids, part.k)
            part.draft_s += clock() - began
        part.drafts = _known(part.proposed[: part.k], vocab_size)


def verify(
    batch: Sequence[Round], target: Target, pages: PagePool, clock: Clock, *, pad_to: int
) -> None:
    """Run the target over every input and draft row."""
    began = clock()
    for part in batch:
        part.request.sequence.reserve(part.num_rows, pages)
    choices = iter(target.step(pack(batch, pad_to=pad_to)).argmax.tolist())
    verify_s = clock() - began
    for part in batch:
        part.request.sequence.extend_kv(part.num_rows)
        part.target_ids = [next(choices) for _ in range(part.num_logits)]
        part.verify_s = verify_s


def accept(batch: Sequence[Round]) -> None:
    """Keep the drafts that the target picked itself, and cut at a stop or limit."""
    for part in batch:
        if part.is_last:
            request = part.request
            part.accepted, emitted = accept_drafts(part.drafts, part.target_ids)
            part.emitted, request.finish_reason = cut(emitted, request.stop_ids, request.remaining)


def commit(batch: Sequence[Round]) -> None:
    """Make the emitted tokens the sequence's own, rolling KV back behind rejected drafts."""
    for part in batch:
        if part.is_last:
            part.request.sequence.commit(part.emitted)


def observe(batch: Sequence[Round], now: float) -> None:
    """Tell statistics, policy and drafter what the round did."""
    for part in batch:
        request = part.request
        if part.is_prefill:
            if part.is_last:
                request.stats.first_token(now)
            continue
        outcome = RoundOutcome(
            k=len(part.drafts),
            accepted=part.accepted,
            emitted=len(part.emitted),
            draft_s=part.draft_s,
            verify_s=part.verify_s,
            round_s=now - request.stats.boundary_s,
        )
        request.stats.observe(outcome, now)
        request.policy.observe(outcome)
        if request.drafter is not None and part.drafts:
            request.drafter.observe(part.drafts, part.accepted)


def _known(proposed: list[int], vocab_size: int) -> list[int]:
    """Cut a proposal before the first id that the target does not have."""
    for i, token_id in enumerate(proposed):
        if not 0 <= token_id < vocab_size:
            return proposed[:i]
    return proposed
