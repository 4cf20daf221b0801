"""The fake engine on a clock that its forwards move: what a step costs is what a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slipstream.engine.engine import Engine
from slipstream.types import KSetting, Reply, SamplingParams
from tests.fake_model import Scripted, continuation, fake_engine, forwards

PROMPT = [3, 1, 4, 1, 5]
COUNT = 150
TEXT = continuation(PROMPT, COUNT)
SCRIPT = [*PROMPT, *TEXT]
STEP_S = 0.01


class Machine:
    """A clock that a forward moves by what its rows cost, and a drafter by what it takes."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.now = 100.0
        self.cost = cost
        self.engine: Engine | None = None

    def __call__(self) -> float:
        return self.now

    def forward(self) -> None:
        assert self.engine is not None
        rows = forwards(self.engine)[-1]
        self.now += self.cost(len(rows.token_ids))

    def wait(self, seconds: float) -> None:
        self.now += seconds


def flat(rows: int) -> float:
    """Cost of a verify that reads the weights once."""
    return STEP_S * (1 + 0.02 * (rows - 1))


def per_row(rows: int) -> float:
    """Cost of a verify that reads the weights for every row."""
    return STEP_S * rows


def engine_on(
    machine: Machine, drafter: Any, *, timed: Sequence[int] = range(1, 17), **settings: Any
) -> Engine:
    """Return an engine whose clock is the machine's, its widths timed as at load."""
    engine = fake_engine(drafter=drafter, clock=machine, after_forward=machine.forward, **settings)
    machine.engine = engine
    assert engine.policy is not None
    for rows in timed:
        engine.policy.cost.calibrate(rows, 0, machine.cost(rows))
    return engine


def one(engine: Engine, *, k: KSetting | None = None, max_tokens: int = COUNT) -> Reply:
    (reply,) = engine.generate([PROMPT], SamplingParams(max_tokens=max_tokens, k=k))
    assert reply.token_ids == TEXT[:max_tokens]
    return reply


def perfect(**options: Any) -> Callable[[], Scripted]:
    return lambda: Scripted(SCRIPT, **options)
