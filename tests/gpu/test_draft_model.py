"""A draft model on the GPU changes the clock and nothing else: the tests of the other back ends."""

from __future__ import annotations

import pytest

from tests.exact.test_draft_model_is_invisible import (
    test_a_cancelled_request_leaves_nothing_behind,
    test_a_context_that_ends_before_the_target_s_ends_drafting_alone,
    test_a_drafter_that_paused_is_caught_up_before_it_drafts,
    test_a_model_that_drafts_for_itself_is_always_right,
    test_a_model_that_drafts_for_itself_is_right_after_every_pause,
    test_a_model_that_fails_costs_its_requests_their_drafts_alone,
    test_a_pool_that_is_used_up_is_declined_with_a_reason,
    test_a_prompt_is_not_read_before_somebody_asks,
    test_a_round_never_exceeds_what_remains,
    test_drafts_depend_neither_on_k_nor_on_batch_mates,
    test_drafts_that_are_sometimes_right_are_sometimes_kept,
    test_padding_rows_of_the_draft_model_are_never_drafted,
    test_text_does_not_depend_on_batch_mates,
    test_text_does_not_depend_on_k,
    test_text_does_not_depend_on_the_drafter,
    test_text_with_a_token_that_the_draft_model_lacks_is_left_alone,
)

__all__ = [
    "test_a_cancelled_request_leaves_nothing_behind",
    "test_a_context_that_ends_before_the_target_s_ends_drafting_alone",
    "test_a_drafter_that_paused_is_caught_up_before_it_drafts",
    "test_a_model_that_drafts_for_itself_is_always_right",
    "test_a_model_that_drafts_for_itself_is_right_after_every_pause",
    "test_a_model_that_fails_costs_its_requests_their_drafts_alone",
    "test_a_pool_that_is_used_up_is_declined_with_a_reason",
    "test_a_prompt_is_not_read_before_somebody_asks",
    "test_a_round_never_exceeds_what_remains",
    "test_drafts_depend_neither_on_k_nor_on_batch_mates",
    "test_drafts_that_are_sometimes_right_are_sometimes_kept",
    "test_padding_rows_of_the_draft_model_are_never_drafted",
    "test_text_does_not_depend_on_batch_mates",
    "test_text_does_not_depend_on_k",
    "test_text_does_not_depend_on_the_drafter",
    "test_text_with_a_token_that_the_draft_model_lacks_is_left_alone",
]

pytestmark = pytest.mark.gpu
