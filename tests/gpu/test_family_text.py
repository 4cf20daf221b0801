"""Speculation is invisible on the GPU in every family and every kind of weights."""

from __future__ import annotations

import pytest

from tests.exact.test_families import (
    family,
    test_each_row_of_a_verify_equals_its_own_classic_step,
    test_rejected_drafts_leave_nothing_that_is_read,
    test_text_does_not_depend_on_drafter_chunk_and_padding,
    test_the_model_says_more_than_one_thing,
)
from tests.exact.test_kinds_are_invisible import test_text_does_not_depend_on_drafts
from tests.families import CONFIGS, family_arch
from tests.tiny import make_backend

__all__ = [
    "family",
    "test_each_row_of_a_verify_equals_its_own_classic_step",
    "test_rejected_drafts_leave_nothing_that_is_read",
    "test_text_does_not_depend_on_drafter_chunk_and_padding",
    "test_text_does_not_depend_on_drafts",
    "test_the_model_says_more_than_one_thing",
]

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["cuda"])
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("name", CONFIGS)
def test_no_family_is_refused(name: str) -> None:
    # What is refused would be skipped by the others.
    make_backend("cuda").kv_cache(family_arch(name), 1, 16)
