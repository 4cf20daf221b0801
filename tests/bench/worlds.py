"""Benchmarks of the fake model on a virtual clock: what is measured is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.bench.arms import Arm, Variant, arms_of
from slipstream.bench.model import Model
from slipstream.bench.plan import Limits
from slipstream.bench.record import Bound, Setup
from slipstream.bench.run import Bench
from slipstream.bench.scripts import Scripts
from slipstream.bench.workload import Conversation, Workload
from slipstream.config import EngineConfig
from slipstream.drafters.scripted import ScriptedSpec
from slipstream.types import KSetting
from tests.fake_model import VOCAB, fake_engine, forwards

STEP_S, ROW_S = 0.010, 0.001  # a forward of one row, and what every further row adds
VARIANT = Variant()


class World:
    """A fake model whose forwards take virtual time by their rows."""

    def __init__(self, **settings: Any) -> None:
        self.now = 0.0
        self.extra_s = 0.0
        self.engine = fake_engine(
            clock=lambda: self.now, after_forward=self._after, drafter=None, **settings
        )
        self.model = Model(self.engine)

    def _after(self) -> None:
        rows = len(forwards(self.engine)[-1].token_ids)
        self.now += STEP_S + ROW_S * (rows - 1) + self.extra_s


def never(_: str, __: float) -> None:
    """Show no progress."""


def bench(
    world: World, k_values: Sequence[KSetting], rates: Sequence[float] = (1.0,), **more: Any
) -> Bench:
    """Return a bench of the fake model with a scripted drafter."""
    scripts = Scripts()
    spec = ScriptedSpec(rates=tuple(rates))
    return Bench(
        {VARIANT: world.model},
        arms_of(k_values, [VARIANT]),
        scripts.maker(spec, VOCAB),
        scripts,
        clock=lambda: world.now,
        **more,
    )


def limits(**changes: Any) -> Limits:
    values: dict[str, Any] = {
        "max_tokens": 24,
        "prompts": 8,
        "batches": (1,),
        "seconds": 1e9,
        "precision": 1.0,
    }
    return Limits(**(values | changes))


def conversation(number: int, category: str = "all", turns: int = 1) -> Conversation:
    """Return a conversation like no other."""
    texts = tuple(f"{category} {number} {turn} {chr(97 + number) * 9}" for turn in range(turns))
    return Conversation(id=str(number), category=category, turns=texts)


def workload(*conversations: Conversation) -> Workload:
    return Workload(name="test", conversations=conversations)


def setup_of() -> Setup:
    """Return what a report says of the machine, all of it made up."""
    return Setup(
        provenance={"model": "fake", "cpu": "none", "cores": 1},
        config=EngineConfig(),
        backend={"name": "fake", "reason": "made up"},
        drafter="scripted",
        workload=workload(conversation(1)),
        limits=limits(),
        bound=Bound(weight_bytes=1, bandwidth=1.0, how="made up"),
        times_s={},
    )


def arm_named(arms: Sequence[Arm], name: str) -> int:
    return [arm.name for arm in arms].index(name)
