"""Virtual machines and short cuts that the policy's tests share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from slipstream.policy.base import RoundOutcome, RoundView, StepOutcome, StepView
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.simulator import Step, World

ROOT = Path(__file__).resolve().parents[2]


def flat_world(
    chance: float, *, step_s: float = 0.01, per_row: float = 0.05, ceiling: int = 7, free: bool
) -> World:
    """Return a world whose verify costs a share of a step more with every row."""
    return World(
        forward_s=lambda rows, context_len, now: step_s * (1.0 + per_row * (rows - 1)),
        chances=lambda now: [chance] * ceiling,
        draft_s=(lambda k: 0.0) if free else lambda k: 0.02 * step_s * k,
        ceiling=ceiling,
        free=free,
    )


def calibrate(policy: MeasuredPolicy, world: World, context_len: int = 100) -> None:
    """Time every width, as loading does."""
    for rows in range(1, world.ceiling + 2):
        for _ in range(3):
            policy.cost.calibrate(rows, context_len, world.forward_s(rows, context_len, 0))


def share_drafting(steps: Sequence[Step]) -> float:
    """Return the share of rounds with k > 0."""
    return sum(step.k > 0 for step in steps) / len(steps)


def view(
    context_len: int = 100,
    ceiling: int = 7,
    proposed: int = 0,
    request: int = 0,
    fixed_k: int | None = None,
) -> RoundView:
    return RoundView(
        remaining=1 << 20,
        context_len=context_len,
        proposed=proposed,
        ceiling=ceiling,
        request=request,
        fixed_k=fixed_k,
    )


def outcome(
    k: int,
    accepted: int,
    round_s: float,
    *,
    draft_s: float = 0.0,
    request: int = 0,
    paid: bool = True,
) -> RoundOutcome:
    return RoundOutcome(
        k=k,
        paid=paid and k > 0,
        accepted=accepted,
        emitted=accepted + 1,
        draft_s=draft_s,
        verify_s=round_s - draft_s,
        round_s=round_s,
        request=request,
        context_len=100,
    )


def batch_step(policy: MeasuredPolicy, ids: Sequence[int]) -> list[int]:
    """Return what the policy would draft for requests that share a step."""
    step = StepView(rounds=[view(request=index) for index in ids])
    return [decision.k for decision in policy.choose_step(step)]


def step_outcome(rounds: Sequence[RoundOutcome], round_s: float) -> StepOutcome:
    return StepOutcome(rounds=rounds, draft_s=0.0, verify_s=round_s, round_s=round_s)


def benchmark(name: str) -> ModuleType:
    """Return a script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    path = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module
