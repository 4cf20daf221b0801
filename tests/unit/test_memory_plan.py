"""A device's memory is shared out under one limit; what does not fit is refused with the sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from slipstream.config import EngineConfig
from slipstream.engine.memory import plan_memory
from slipstream.engine.target import build_target
from slipstream.errors import CapacityError
from slipstream.kernels.ops import PAGE_SIZE
from tests.tiny import ARCH

MIB = 1 << 20


@dataclass
class Device:
    """Memory of 100 MiB with pages of 1 MiB and 10 MiB of work space."""

    asked: list[dict[str, int]] = field(default_factory=list)

    def limit_bytes(self, fraction: float) -> int:
        return int(100 * MIB * fraction)

    def page_bytes(self, arch: Any) -> int:
        return MIB

    def workspace_bytes(self, arch: Any, **limits: int) -> int:
        self.asked.append(limits)
        return 10 * MIB


def plan(weights: int = 20, **settings: Any) -> Any:
    config = EngineConfig(**{"memory_fraction": 1.0, "max_num_seqs": 2, **settings})
    return plan_memory(
        Device(),
        ARCH,
        config,
        weights_bytes=weights * MIB,
        max_model_len=config.max_model_len or ARCH.context_len,
        max_rows=64,
    )


def test_every_sequence_gets_a_full_context_where_there_is_room() -> None:
    assert plan().num_pages == 2 * ARCH.context_len // PAGE_SIZE
    assert plan().kv_bytes == plan().num_pages * MIB


def test_many_sequences_share_what_there_is() -> None:
    assert plan(max_num_seqs=64).num_pages == 70
    assert plan(max_num_seqs=64, memory_fraction=0.8).num_pages == 50


def test_what_is_asked_for_is_taken_as_it_is() -> None:
    assert plan(kv_tokens=33).num_pages == 3


def test_less_than_one_context_is_refused_with_the_sum() -> None:
    with pytest.raises(CapacityError) as caught:
        plan(weights=70)
    assert caught.value.message == (
        "the model does not fit memory_fraction 1.0: weights 0.07 + work space 0.01 + "
        "KV of 512 tokens 0.03 = 0.11 of 0.10 GiB"
    )
    assert caught.value.hint is not None
    assert "memory_fraction" in caught.value.hint


def test_more_kv_than_fits_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"KV of 1136 tokens 0\.07"):
        plan(kv_tokens=71 * PAGE_SIZE)


def test_weights_beyond_the_limit_are_refused() -> None:
    with pytest.raises(CapacityError, match=r"weights 0\.20"):
        plan(weights=200)


class _Backend:
    """As much of a back end as the building of a target touches."""

    name = "fake"
    reason = "tests"

    def __init__(self) -> None:
        self.memory = Device()
        self.taken = 0

    def weight_bytes(self) -> int:
        return 20 * MIB

    def kv_cache(self, arch: Any, num_pages: int, max_len: int) -> Any:
        self.taken = num_pages
        return None

    def compile(self, forward: Any, *, max_rows: int, max_logits: int) -> Any:
        return None


def test_a_target_takes_the_pages_of_its_plan() -> None:
    backend: Any = _Backend()
    config = EngineConfig(memory_fraction=1.0, max_num_seqs=64)
    target = build_target(ARCH, backend, lambda _: None, config)  # type: ignore[arg-type, return-value]
    assert target.plan is not None
    assert backend.taken == target.plan.num_pages == 70
    assert target.kv_token_bytes == MIB // PAGE_SIZE


def test_without_a_device_of_its_own_there_is_no_plan() -> None:
    backend: Any = _Backend()
    del backend.memory
    target = build_target(ARCH, backend, lambda _: None, EngineConfig())  # type: ignore[arg-type, return-value]
    assert target.plan is None
