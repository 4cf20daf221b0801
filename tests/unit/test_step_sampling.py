"""Where a step samples, replies are those that the engine samples from the step's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipstream.drafters.base import Drafter
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.sampling.reference import pick
from slipstream.errors import SlipstreamError
from slipstream.kernels.noise import NoiseKey
from slipstream.kernels.ops import Rows, StepResult
from slipstream.types import DetailedReply, SamplingParams
from tests.fake_model import FakeStep, Scripted, fake_engine

NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.float32), None)
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [40] * 20, [1, 2]]
PARAMS = (
    SamplingParams(max_tokens=20),
    SamplingParams(max_tokens=20, temperature=0.8, seed=1),
    SamplingParams(max_tokens=20, temperature=1.5, seed=2, top_k=9, top_p=0.8, min_p=0.01),
    SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=3),
    SamplingParams(max_tokens=20, temperature=1.0, seed=2**64 - 1, logprobs=2),
    SamplingParams(max_tokens=20, temperature=1.0, seed=4, repetition_penalty=1.3),
    SamplingParams(max_tokens=20, temperature=1e-60, seed=4),
)


class SamplingStep(FakeStep):
    """The fake step with the definition of sampling behind it."""

    samples = True
    num_sampled = 0
    broken = False

    def __call__(self, rows: Rows) -> StepResult:
        result = super().__call__(rows)
        picks = rows.picks
        if picks is None:
            return result
        assert len(picks.temperatures) == len(rows.logit_rows)
        chosen = result.argmax.copy()
        for row in np.flatnonzero(picks.temperatures):
            self.num_sampled += 1
            if self.broken:
                chosen[row] = -1
                continue
            chosen[row] = pick(
                result.logits[row],
                *NOTHING,
                temperature=float(picks.temperatures[row]),
                top_k=int(picks.top_k[row]),
                top_p=float(picks.top_p[row]),
                min_p=float(picks.min_p[row]),
                key=NoiseKey(
                    seed=int(picks.seeds[row]),
                    choice=int(picks.choices[row]),
                    position=int(picks.positions[row]),
                ),
            )
        return StepResult(logits=result.logits, argmax=chosen)


def sampling_engine(**settings: Any) -> tuple[Engine, SamplingStep]:
    """Return a fake engine whose steps sample."""
    engine = fake_engine(**settings)
    step = SamplingStep(engine.target.kv, lambda: None)  # type: ignore[arg-type]
    object.__setattr__(engine.target, "step", step)
    object.__setattr__(engine._limits, "steps_sample", True)
    return engine, step


def facts(engine: Engine, params: SamplingParams) -> list[Any]:
    """Return ids and logprobs of every reply."""
    return [
        (reply.token_ids, reply.logprobs if isinstance(reply, DetailedReply) else None)
        for reply in engine.generate(PROMPTS, params)
    ]


def scripted() -> Drafter:
    """Return a drafter that knows a greedy reply, which sampling sometimes follows."""
    (reply,) = fake_engine().generate([PROMPTS[0]], SamplingParams(max_tokens=20))
    return Scripted(PROMPTS[0] + reply.token_ids)


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@pytest.mark.parametrize("drafter", [None, NGramDrafter, scripted])
def test_replies_do_not_depend_on_who_samples(
    params: SamplingParams, drafter: Callable[[], Drafter] | None
) -> None:
    for k in (0, 3):
        engine, step = sampling_engine(drafter=drafter, k=k, prefill_chunk=7, verify_pad="4")
        expected = facts(fake_engine(drafter=drafter, k=k), params)
        assert facts(engine, params) == expected
        is_plain = params.repetition_penalty == 1 and params.temperature > 1e-30
        assert (step.num_sampled > 0) == is_plain


def test_a_row_without_a_token_ends_its_request_only() -> None:
    engine, step = sampling_engine()
    step.broken = True
    with pytest.raises(SlipstreamError, match="a row at position 2 must have a finite"):
        engine.generate([[1, 2]], SamplingParams(max_tokens=5, temperature=1.0, seed=1))
    (reply,) = engine.generate([[1, 2]], SamplingParams(max_tokens=5))
    assert len(reply.token_ids) == 5
