"""Speculation is invisible on the GPU in every family and every kind of weights."""

from __future__ import annotations

import pytest

from slipstream.errors import LoadError
from tests.exact import test_kinds_are_invisible as kinds
from tests.exact.test_families import (
    family,
    test_each_row_of_a_verify_equals_its_own_classic_step,
    test_rejected_drafts_leave_nothing_that_is_read,
    test_text_does_not_depend_on_drafter_chunk_and_padding,
    test_the_model_says_more_than_one_thing,
)
from tests.families import CONFIGS, family_arch
from tests.quantized import KINDS
from tests.tiny import make_backend

__all__ = [
    "family",
    "test_each_row_of_a_verify_equals_its_own_classic_step",
    "test_rejected_drafts_leave_nothing_that_is_read",
    "test_text_does_not_depend_on_drafter_chunk_and_padding",
    "test_the_model_says_more_than_one_thing",
]

pytestmark = pytest.mark.gpu

# Scales of float32, and second levels that no K-quant has.
REFUSED = [
    name for name, own in KINDS.items() if own["numbers"] == "f32" or name.startswith("two levels")
]
READ = [name for name in (*KINDS, *kinds.MIXED) if name not in REFUSED]


@pytest.mark.parametrize("name", CONFIGS)
def test_no_family_is_refused(name: str) -> None:
    # What is refused would be skipped by the others.
    make_backend("cuda").kv_cache(family_arch(name), 1, 16)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", READ)
def test_text_does_not_depend_on_drafts_in_any_kind(kind: str, temperature: float) -> None:
    kinds.test_text_does_not_depend_on_drafts("cuda", kind, temperature)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_is_named(kind: str) -> None:
    with pytest.raises(LoadError, match="takes scales and biases of float16 or bfloat16"):
        kinds.said("cuda", kind, 0.0)
