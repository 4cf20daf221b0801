"""Why the server is speculating, or why not: what `GET /v1/speculation` answers.

The verdict is the policy's own forecast for the requests that run now, or for one that would begin
now where none does. Beside it stands everything that it follows from: what a round of each width
takes against a classic step, how many drafts are accepted by position, what is owed to the loss
budget, and what was in fact done. All of it is read between two steps, on the engine's thread, so
that the numbers belong together and nothing of the policy's is touched while it works.

docs/metrics.md documents every field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from slipstream.engine.causes import CAUSES
from slipstream.engine.engine import Engine
from slipstream.engine.threaded import ThreadedEngine
from slipstream.engine.totals import RoundTotals, accepted_by_position, by_source
from slipstream.errors import SlipstreamError
from slipstream.policy.acceptance import Acceptance
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.forecast import Forecast, forecast
from slipstream.policy.plan import widths_of
from slipstream.policy.request_state import RequestState
from slipstream.policy.round_cost import RoundCost
from slipstream.policy.widths import share_rows
from slipstream.types import MAX_K

SCHEMA = 1
# A prompt's chunk of a large model on a CPU takes seconds; a step beyond this is a fault.
TIMEOUT_S = 30.0


def explain(engine: Engine | ThreadedEngine, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the present verdict and what it follows from, as JSON values.

    It waits for the end of the step that runs: call it from a thread that may wait.

    Raises:
        SlipstreamError: the step takes longer than `timeout_s`.
    """
    try:
        return engine.read(_explain, timeout_s)
    except TimeoutError:
        raise SlipstreamError(
            f"the engine has been in one step for more than {timeout_s:g} s"
        ) from None


def _explain(engine: Engine) -> dict[str, Any]:
    policy = engine.policy
    states = [] if policy is None else _states(engine, policy)
    found = _verdict(engine, policy, states)
    rounds = engine.stats.rounds
    return {
        "schema": SCHEMA,
        "mode": engine.config.k if isinstance(engine.config.k, str) else f"fixed:{engine.config.k}",
        "ceiling": 0 if policy is None else policy.max_k,
        "verdict": found.verdict,
        "reason": found.reason,
        "predicted_speedup": _rounded(found.speedup),
        "widths": found.widths,
        "paid": found.paid,
        "batch": len(found.widths),
        "context_len": round(fmean([state.context_len for state in states])) if states else 0,
        "costs": [] if policy is None else _costs(policy, states, found),
        "acceptance": _acceptance(_used(states, found.paid), rounds),
        "budget": None if policy is None else _budget(policy, states),
        "recent": _recent(rounds),
        "undrafted": dict.fromkeys(CAUSES, 0) | rounds.undrafted,
        "sources": _sources(engine),
        "profile": engine.pairing.profile,
        "requests": _requests(engine),
        "totals": _totals(engine),
    }


def _states(engine: Engine, policy: MeasuredPolicy) -> list[RequestState]:
    """Return what is known of the requests that are the policy's to size.

    Where none runs, that is a request that would begin now.
    """
    numbers = [request.number for request in engine.running if request.fixed_k is None]
    known = [policy.requests[number] for number in numbers if number in policy.requests]
    if known:
        return known
    idle = RequestState.start(policy.acceptance, policy.rounds)
    return [dataclasses.replace(idle, acceptance=policy.acceptance)]


def _used(states: Sequence[RequestState], paid: Sequence[bool]) -> list[Acceptance]:
    """Return what is known of the drafter that each request would use."""
    return [state.acceptance[is_paid] for state, is_paid in zip(states, paid, strict=True)]


def _verdict(
    engine: Engine, policy: MeasuredPolicy | None, states: Sequence[RequestState]
) -> Forecast:
    k = engine.config.k
    if policy is None or k == 0:
        drafter = "any" if engine.pairing.make_drafters else "none"
        off = engine.pairing.policy_of(0, k, drafter=drafter, ceiling=0)
        return Forecast(verdict=off.verdict, reason=off.reason, speedup=None, widths=[], paid=[])
    if isinstance(k, int):
        own = policy.request(0, k)
        return Forecast(
            verdict=own.verdict,
            reason=own.reason,
            speedup=None,
            widths=[k] * len(states),
            paid=[policy.paid] * len(states),
        )
    return forecast(policy, states)


def _costs(
    policy: MeasuredPolicy, states: Sequence[RequestState], found: Forecast
) -> list[dict[str, Any]]:
    """Return what a step takes by drafted tokens, 0 the classic step.

    As in the policy, further tokens go to the requests that are likeliest to have them accepted.
    Up to the widest round of one request every count is listed, beyond it the fullest of each row
    bucket, and what is chosen.
    """
    cost, batch = policy.cost, len(states)
    kv_tokens = sum([state.context_len for state in states])
    survivals = [known.survival[: policy.max_k] for known in _used(states, found.paid)]
    if batch == 1:  # every k, however faint
        order = [(0, chance) for chance in survivals[0]]
    else:
        order = share_rows(survivals, [policy.max_k] * batch, batch * policy.max_k)
    chosen = sum(found.widths)
    listed = {*range(MAX_K + 1), *(edge - batch for edge in cost.verify.edges), chosen}
    gains = [0.0, *accumulate(chance for _, chance in order)]
    return [
        _cost(cost, widths_of(order[:num], batch), found.paid, kv_tokens, batch + gains[num])
        | {"age_steps": _age(policy, batch, num)}
        for num in sorted(listed)
        if 0 <= num <= len(order)
    ]


def _cost(
    cost: RoundCost,
    widths: Sequence[int],
    paid: Sequence[bool],
    kv_tokens: int,
    tokens: float,
) -> dict[str, Any]:
    """Return what a step of some widths takes, and what classic steps take for its tokens."""
    batch, drafted = len(widths), sum(widths)
    classic_s = cost.classic.time_s(batch, kv_tokens)
    draft_s, round_s = 0.0, classic_s
    if drafted:
        own = [k if is_paid else 0 for k, is_paid in zip(widths, paid, strict=True)]
        draft_s = cost.drafting.peek_s(batch) + cost.drafting.drafting_s(own)
        round_s = cost.round_s(batch + drafted, kv_tokens, draft_s)
    worth_s = None if classic_s is None else tokens * classic_s / batch
    return {
        "drafted": drafted,
        "rows": batch + drafted,
        "round_ms": _ms(round_s),
        "draft_ms": _ms(draft_s),
        "tokens": _rounded(tokens),
        "classic_ms": _ms(worth_s),
        "speedup": _rounded(worth_s / round_s) if worth_s and round_s else None,
    }


def _age(policy: MeasuredPolicy, batch: int, drafted: int) -> int | None:
    """Return how many steps ago a row count was last run, None where not since the start."""
    cost = policy.cost
    if drafted:
        seen = cost.verify.seen_at(cost.padded(batch + drafted))
    else:
        seen = cost.classic.seen_at(batch)
    return policy.rounds - seen if seen is not None and seen > 0 else None


def _acceptance(known: Sequence[Acceptance], rounds: RoundTotals) -> list[dict[str, Any]]:
    """Return what is believed of each draft position, and what was counted there.

    Args:
        known: of the drafter that each request would use.
    """
    drafted, accepted = accepted_by_position(rounds.outcomes)
    return [
        {
            "position": index + 1,
            "chance": _mean_at([each.chances for each in known], index),
            "survival": _mean_at([each.survival for each in known], index),
            "drafted": drafted[index],
            "accepted": accepted[index],
        }
        for index in range(MAX_K)
    ]


def _budget(policy: MeasuredPolicy, states: Sequence[RequestState]) -> dict[str, Any]:
    ledger = policy.ledger
    kv = sum([state.context_len for state in states])
    classic_s = policy.cost.classic.time_s(len(states), kv)
    return {
        "debt_ms": _ms(ledger.debt_s),
        "saved_ms": _ms(ledger.saved_s),
        "capacity_ms": None if classic_s is None else _ms(ledger.capacity_steps * classic_s),
        "capacity_steps": ledger.capacity_steps,
        "capacity_batch": len(states),
        "leak": ledger.rho,
        "net_ms": _ms(ledger.net_s),
        "forgiven_ms": _ms(ledger.forgiven_s),
        "lookups_rest": policy.rests,
    }


def _recent(rounds: RoundTotals) -> dict[str, Any]:
    histogram = [0] * (MAX_K + 1)
    for k in rounds.recent_k:
        histogram[k] += 1
    return {"rounds": len(rounds.recent_k), "k_histogram": histogram}


def _sources(engine: Engine) -> dict[str, dict[str, Any]]:
    rounds = engine.stats.rounds
    counts = by_source(rounds.outcomes)
    found = {
        source: {
            "drafted": counts.get(source, (0, 0))[0],
            "accepted": counts.get(source, (0, 0))[1],
            "draft_ms": _ms(rounds.draft_s.get(source, 0.0)),
        }
        for source in sorted({*counts, *rounds.draft_s})
    }
    return {name: each for name, each in found.items() if each["drafted"] or each["draft_ms"]}


def _requests(engine: Engine) -> dict[str, int]:
    stats, running = engine.stats, len(engine.running)
    return {
        "running": running,
        "waiting": engine.num_requests - running,
        "finished": stats.finished,
        "cancelled": stats.cancelled,
        "dropped": stats.dropped,
    }


def _totals(engine: Engine) -> dict[str, Any]:
    stats, rounds, pages = engine.stats, engine.stats.rounds, engine.pages
    return {
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.completion_tokens,
        "steps": stats.steps,
        "step_s": round(rounds.busy_s, 6),
        "decode_s": round(rounds.decode_s, 6),
        "decode_classic_s": round(rounds.worth_s, 6),
        "unused_draft_s": round(rounds.unused_draft_s, 6),
        "kv_pages_used": pages.num_taken,
        "kv_pages": pages.num_pages,
    }


def _mean_at(rows: Sequence[Sequence[float]], index: int) -> float | None:
    return round(fmean([row[index] for row in rows]), 4) if rows else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 4)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
