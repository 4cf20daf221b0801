"""The phases of a step, in order; each fills in the rounds of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from slipstream.engine import drafting
from slipstream.engine.accept import accept_drafts, cut
from slipstream.engine.budget import RowBudget, share_out
from slipstream.engine.causes import cause_of
from slipstream.engine.pages import PagePool
from slipstream.engine.round import Round, pack
from slipstream.engine.sampling import no_token
from slipstream.engine.stats import EngineStats
from slipstream.engine.target import Target
from slipstream.errors import SlipstreamError
from slipstream.policy.base import StepOutcome, StepView
from slipstream.policy.choose import MeasuredPolicy

Clock = Callable[[], float]


class Spent(NamedTuple):
    """Seconds of a step that the policy took: for its choice, and for taking in the step before."""

    choose_s: float
    observe_s: float


Observer = Callable[[StepOutcome], None]


def peek(
    batch: Sequence[Round], policy: MeasuredPolicy | None, clock: Clock, *, vocab_size: int
) -> None:
    """Ask drafters that cost nothing, before the policy decides."""
    if policy is None:
        return
    may_peek = policy.may_peek
    for part in batch:
        request, ceiling = part.request, part.ceiling
        drafter = request.free_drafter
        if not may_peek and not request.fixed_k:
            part.cause = "resting"
        elif drafter is not None and ceiling:
            most = min(ceiling, drafter.max_k)
            part.proposed, part.peek_s = drafting.ask(
                request, drafter, most, clock, vocab_size=vocab_size
            )


def choose(
    batch: Sequence[Round], policy: MeasuredPolicy | None, budget: RowBudget, clock: Clock
) -> float:
    """Let the policy size the rounds that may draft, as far as there are rows for it.

    Widths that requests have asked for are served first; where rows are short the widest are cut.

    Returns:
        The seconds that it took.
    """
    if policy is None or not any([part.may_draft for part in batch]):  # noqa: C419 - in every step
        return 0.0
    if not policy.may_decide and not any([part.fixed_width for part in batch]):  # noqa: C419
        for part in batch:
            if part.may_draft:  # to follow what is offered would take as long as to decide
                part.proposed, part.cause = [], "resting"
        return 0.0
    began = clock()
    policy.settle()
    rounds, widths = [], []
    prefill_rows = prefill_kv = 0
    for part in batch:
        if part.is_prefill:
            prefill_rows += part.num_rows
            prefill_kv += part.context_len
        else:
            rounds.append(part)
            widths.append(part.fixed_width)
    room = budget.draft_rows(len(rounds) + prefill_rows, len(batch))
    fixed = share_out(widths, room) if any(widths) else widths
    view = StepView(
        rounds=[part.view(width) for part, width in zip(rounds, fixed, strict=True)],
        prefill_rows=prefill_rows,
        prefill_kv=prefill_kv,
        max_draft_rows=room - sum(fixed),
    )
    for part, decision in zip(rounds, policy.choose_step(view), strict=True):
        part.k, part.paid, part.shadow = decision.k, decision.paid, decision.shadow
        if decision.k == 0 and part.may_draft:
            part.cause = cause_of(decision.reason)
    return clock() - began


def propose(batch: Sequence[Round], clock: Clock, *, vocab_size: int) -> None:
    """Draft at most k tokens; a drafter that offers fewer makes the round narrower.

    What is proposed and not verified is followed, to be scored against what is emitted.
    """
    asked = [part for part in batch if part.wanted and part.request.paid_drafter is not None]
    if asked:
        drafting.ask_paid(asked, clock, vocab_size=vocab_size)
    for part in batch:
        request, offered = part.request, part.proposed
        part.drafts = part.drafted if part.paid else offered[: part.k]
        if part.shadow:
            request.shadows.propose(part.drafted)
        if part.k and not part.paid:
            request.scoring.clear()
        elif offered:
            request.scoring.propose(offered)


def verify(
    batch: Sequence[Round], target: Target, pages: PagePool, clock: Clock, *, pad_to: int
) -> None:
    """Run the target over every input and draft row."""
    began = clock()
    for part in batch:
        part.request.sequence.reserve(part.num_rows, pages)
    result = target.step(pack(batch, pad_to=pad_to))
    choices = result.argmax.tolist()
    verify_s = clock() - began
    first = first_row = 0
    for part in batch:
        part.request.sequence.extend_kv(part.num_rows)
        part.first_row, part.run = first_row, result.run
        first_row += part.num_rows
        end = first + part.num_logits
        part.target_ids = choices[first:end]
        if part.request.reads_logits:  # a device keeps what nobody reads
            part.logits = result.logits[first:end]
        first = end
        part.verify_s = verify_s


def accept(batch: Sequence[Round]) -> None:
    """Keep the drafts that the target picks itself, and cut at a stop id or the limit."""
    for part in batch:
        if part.is_last:
            request = part.request
            try:
                part.accepted, emitted = _picked(part)
            except SlipstreamError as error:  # every token is banned, or the row is broken
                request.error, request.finish_reason = error, "error"
                continue
            part.emitted, request.finish_reason = cut(emitted, request.stop_ids, request.remaining)


def read(batch: Sequence[Round]) -> None:
    """Turn emitted ids into text, and cut at a stop string."""
    for part in batch:
        request = part.request
        # A stop id is not text.
        spelled = part.emitted[:-1] if request.finish_reason == "stop" else part.emitted
        too_early = request.min_tokens - request.sequence.num_generated
        part.text, num_used = request.text.push(spelled, may_stop_after=too_early)
        if num_used is not None:
            part.emitted, request.finish_reason = part.emitted[:num_used], "stop"
        elif request.finish_reason is not None:
            part.text += request.text.finish()


def score(batch: Sequence[Round]) -> None:
    """Take the log-probabilities of the emitted tokens where they are asked for."""
    for part in batch:
        request = part.request
        if request.reports_logprobs:
            pairs = zip(part.logits, part.emitted, strict=False)
            part.logprobs = [request.sampler.logprobs(row, token) for row, token in pairs]
            request.logprobs += part.logprobs


def commit(batch: Sequence[Round], pages: PagePool) -> None:
    """Make the emitted tokens the sequence's own, rolling KV back behind rejected drafts.

    What is full and final then is open to other sequences.
    """
    for part in batch:
        sequence = part.request.sequence
        if part.is_last:
            sequence.commit(part.emitted)
            if drafting.head_of(part.request) is not None:
                part.request.chosen = part.chosen
        sequence.publish(pages)


def observe(
    batch: Sequence[Round],
    stats: EngineStats,
    policy: MeasuredPolicy | None,
    observers: Sequence[Observer],
    spent: Spent,
    clock: Clock,
    *,
    began: float,
    now: float,
) -> float:
    """Tell statistics, drafters, policy and observers what the step did.

    Args:
        spent: what the policy itself took in this step.
        began: when the step began, the host's work since the one before included.
        now: when its tokens were there.

    Returns:
        The seconds that an engine which never drafts would not have taken.
    """
    stats.count(batch, began, now, sum(spent))
    started = clock()
    if not observers and (policy is None or _passes_by(batch, policy, spent, now - began)):
        took_s = clock() - started
        for part in batch:
            if not part.is_prefill:
                part.request.stats.classic(now)
        return took_s
    outcomes = []
    draft_s = peek_s = 0.0
    prefill_rows = prefill_kv = 0
    for part in batch:
        if part.is_prefill:
            prefill_rows += part.num_rows
            prefill_kv += part.context_len
            continue
        request = part.request
        outcome = part.outcome(now)
        outcomes.append(outcome)
        draft_s += part.draft_s
        peek_s += part.peek_s
        request.stats.observe(outcome, part.drafter_name, now)
        if part.drafts:
            drafting.tell(request, part.drafter, part.drafts, part.accepted)
    if not outcomes:
        return 0.0
    step = StepOutcome(
        rounds=outcomes,
        draft_s=draft_s,
        peek_s=peek_s,
        choose_s=spent.choose_s,
        observe_s=spent.observe_s,
        verify_s=batch[0].verify_s,
        round_s=now - began,
        prefill_rows=prefill_rows,
        prefill_kv=prefill_kv,
    )
    if policy is not None:
        stats.rounds.weigh(step, policy.observe_step(step))
    took_s = clock() - started
    for tell in observers:
        tell(step)
    return took_s


def _passes_by(
    batch: Sequence[Round], policy: MeasuredPolicy, spent: Spent, round_s: float
) -> bool:
    """Tell whether a step drafted nothing and had nothing to score, and the policy lets it pass."""
    numbers, kv_tokens, peek_s = [], 0, 0.0
    for part in batch:
        request = part.request
        if part.is_prefill or part.proposed or request.scoring.live or request.shadows.live:
            return False
        if part.drafts or part.shadow or part.caught_up:
            return False
        numbers.append(request.number)
        kv_tokens += part.context_len
        peek_s += part.peek_s
    return policy.pass_by(
        numbers,
        kv_tokens,
        peek_s=peek_s,
        choose_s=spent.choose_s,
        observe_s=spent.observe_s,
        round_s=round_s,
    )


def _picked(part: Round) -> tuple[int, list[int]]:
    """Return the accepted count and the target's choices, the accepted drafts and one more."""
    request = part.request
    if request.history is None:
        accepted, emitted = accept_drafts(part.drafts, part.target_ids)
        if emitted[-1] < 0:  # no draft is, so the target's choice is the last
            raise no_token(len(request.sequence.token_ids) + accepted)
        return accepted, emitted
    emitted = request.sampler.pick_run(part.logits, request.history, part.drafts, part.target_ids)
    return len(emitted) - 1, emitted
