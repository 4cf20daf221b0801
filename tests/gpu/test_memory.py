"""The plan of the GPU's memory is one that a loaded engine keeps to."""

from __future__ import annotations

import pytest

from slipstream.config import EngineConfig
from slipstream.engine.target import build_target
from slipstream.errors import CapacityError
from tests.drafting import make_assistant
from tests.tiny import ARCH, make_backend, tiny_tensors, tiny_weights

pytestmark = pytest.mark.gpu


def test_work_space_is_within_its_plan() -> None:
    backend = make_backend("cuda")
    tensors = tiny_tensors()
    target = build_target(
        ARCH, backend, lambda to: tiny_weights(to, tensors), EngineConfig(max_num_seqs=32)
    )
    assert target.plan is not None
    tables = 4 * ARCH.uniform.head_dim * target.max_model_len
    assert target.step.workspace_bytes + tables <= target.plan.workspace_bytes  # type: ignore[attr-defined]
    assert target.plan.kv_bytes == sum(page.nbytes for page in target.kv.pages.values())  # type: ignore[attr-defined]


def test_an_assistant_is_within_its_plan() -> None:
    tensors, max_rows = tiny_tensors(), 32
    target = build_target(
        ARCH,
        make_backend("cuda"),
        lambda to: tiny_weights(to, tensors),
        EngineConfig(max_num_seqs=max_rows),
        assistant=make_assistant(ARCH, hidden_size=64),
    )
    assert target.plan is not None
    head, kept = target.head, sum(values.nbytes for values in target.step.kept)  # type: ignore[attr-defined]
    taken = head._step.workspace_bytes + kept  # type: ignore[union-attr]
    assert 0 < taken <= target.plan.drafter_bytes - target.head_bytes


def test_what_does_not_fit_is_refused_with_the_sum() -> None:
    backend = make_backend("cuda")
    tensors = tiny_tensors()
    with pytest.raises(CapacityError, match=r"memory_fraction 0.05: weights .* GiB"):
        build_target(
            ARCH,
            backend,
            lambda to: tiny_weights(to, tensors),
            EngineConfig(memory_fraction=0.05, kv_tokens=1 << 24),
        )
