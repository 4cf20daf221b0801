"""Records what rounds took, in the form that `slipstream simulate` replays."""

from __future__ import annotations

import json
from typing import Any

from slipstream.policy.base import StepOutcome
from slipstream.policy.replay import SCHEMA

MAX_ROUNDS = 100_000  # some 50 MB in memory, minutes of a small model and hours of a large one


class TraceRecorder:
    """Takes in steps and writes them as one trace.

    A trace has rounds of one sequence: steps that several shared, or that read a prompt as well,
    cost what no single round does. They are counted and left out, and so is what comes after
    `MAX_ROUNDS`.

    Args:
        name: what the trace will be called.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rounds: list[dict[str, Any]] = []
        self.num_shared_steps = 0
        self.num_late_rounds = 0

    def observe(self, step: StepOutcome) -> None:
        """Take in a step."""
        if len(step.rounds) != 1 or step.prefill_rows:
            self.num_shared_steps += 1
            return
        if len(self.rounds) >= MAX_ROUNDS:
            self.num_late_rounds += 1
            return
        (part,) = step.rounds
        self.rounds.append(
            {
                "k": part.k,
                "accepted": part.accepted,
                "emitted": part.emitted,
                "round_ms": _ms(step.round_s),
                "draft_ms": _ms(step.draft_s),
                "verify_ms": _ms(step.verify_s),
                "context_len": part.context_len,
            }
        )

    def trace(self) -> dict[str, Any]:
        """Return the trace as JSON values."""
        return {
            "name": self.name,
            "rounds": self.rounds,
            "num_shared_steps": self.num_shared_steps,
            "num_late_rounds": self.num_late_rounds,
        }

    def as_json(self) -> str:
        """Return the text of a file with this one trace."""
        content = {"schema": SCHEMA, "traces": [self.trace()]}
        return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)
