"""The command line with a fake model behind it, for tests of what users see.

`run(words)` in a program runs a command on the fake engine. The model says numbers in angle
brackets, and repeats itself, so n-gram drafts are accepted.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from slipstream.cli import main
from slipstream.config import EngineConfig
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.engine import Engine
from tests.fake_model import fake_engine


class Transcript:
    """A chat template that spells roles and texts."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        lines = (f"{message['role'][0]}:{message['content']}\n" for message in messages)
        return "".join(lines) + "a:"


def talker(config: EngineConfig, *, step_s: float = 0.0, template: bool = True) -> Engine:
    """Return a fake engine that can chat; each forward takes `step_s`.

    Its clock stands still, so "auto" would measure nothing: it drafts 4.
    """
    engine = fake_engine(
        drafter=None if config.drafter == "none" else NGramDrafter,
        max_model_len=config.max_model_len or 4096,
        template=Transcript() if template else None,
        after_forward=lambda: time.sleep(step_s),
        k=4 if config.k == "auto" else config.k,
    )
    backend = cast("Any", SimpleNamespace(name="fake", reason="numpy"))
    engine.target = dataclasses.replace(engine.target, backend=backend)
    return engine


def loader(**options: Any) -> tuple[ModuleType, list[Engine]]:
    """Return a module to stand for `slipstream.engine.load`, and the engines that it made."""
    engines: list[Engine] = []

    def load(model: str, config: EngineConfig) -> Engine:
        engines.append(talker(config, **options))
        return engines[-1]

    module = ModuleType("slipstream.engine.load")
    module.load = load  # type: ignore[attr-defined]
    return module, engines


def run(words: Sequence[str], **options: Any) -> int:
    """Run a command of the command line on a fake engine and return its exit code."""
    sys.modules["slipstream.engine.load"], _ = loader(**options)
    return main(words)
