"""Engines on the GPU: drafter, k, kernel, padding, chunks, prefix and batch never change a byte.

The tests are those of the other back ends, run on this one, and what only this one has: verify
kernels, tiles, device-side choices.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.drafters.base import Drafter
from slipstream.drafters.ngram import NGramDrafter
from tests.exact.test_batch_is_invisible import (
    PARAMS,
    PROMPTS,
    Visit,
    drafters,
    play,
    test_a_cached_prefix_gives_the_bytes_of_a_cold_run,
    test_a_continued_conversation_reuses_pages_that_verifies_wrote,
    test_each_of_eight_equals_its_serial_run,
    test_every_batch_size_with_cancels,
)
from tests.exact.test_speculation_is_invisible import (
    classic,
    run,
    script,
    test_a_reply_to_the_very_end_of_the_context_equals_the_classic_one,
    test_a_request_after_a_cancelled_one_equals_a_first_one,
    test_a_second_request_equals_the_first,
    test_text_and_kv_do_not_depend_on_drafter_and_k,
    test_text_and_kv_do_not_depend_on_k_in_any_weight_kind,
    test_text_and_kv_do_not_depend_on_padding,
    test_text_and_kv_do_not_depend_on_prefill_chunks,
    test_the_model_says_more_than_one_thing,
    tiny_engine,
)
from tests.fake_model import Scripted

__all__ = [
    "test_a_cached_prefix_gives_the_bytes_of_a_cold_run",
    "test_a_continued_conversation_reuses_pages_that_verifies_wrote",
    "test_a_reply_to_the_very_end_of_the_context_equals_the_classic_one",
    "test_a_request_after_a_cancelled_one_equals_a_first_one",
    "test_a_second_request_equals_the_first",
    "test_each_of_eight_equals_its_serial_run",
    "test_every_batch_size_with_cancels",
    "test_text_and_kv_do_not_depend_on_drafter_and_k",
    "test_text_and_kv_do_not_depend_on_k_in_any_weight_kind",
    "test_text_and_kv_do_not_depend_on_padding",
    "test_text_and_kv_do_not_depend_on_prefill_chunks",
    "test_the_model_says_more_than_one_thing",
]

pytestmark = pytest.mark.gpu

KERNELS = [("gemv", 16), ("multirow", 16), ("tile", 16), ("tile", 32), ("tile", 64), ("tile", 128)]


@pytest.mark.parametrize("pad", ["off", "8"])
@pytest.mark.parametrize("k", [1, 4, 8, 15])
@pytest.mark.parametrize(("kernel", "tile_m"), KERNELS)
def test_text_and_kv_do_not_depend_on_the_verify_kernel(
    kernel: str, tile_m: int, k: int, pad: str
) -> None:
    known = script("cuda")
    engine = tiny_engine(
        "cuda",
        lambda: Scripted(known, lambda n, place: place == n % 5),
        k=k,
        backend_options={"kernel": kernel, "tile_m": tile_m},
        verify_kernel=kernel,
        tile_m=tile_m,
        verify_pad=pad,
    )
    assert run(engine) == classic("cuda")


@pytest.mark.parametrize(("kernel", "tile_m"), KERNELS)
def test_batches_do_not_depend_on_the_verify_kernel(kernel: str, tile_m: int) -> None:
    make: Callable[[], Drafter] | None = drafters("cuda")["uneven"]
    engine = tiny_engine(
        "cuda",
        make,
        k=4,
        backend_options={"kernel": kernel, "tile_m": tile_m},
        verify_kernel=kernel,
        tile_m=tile_m,
        prefill_chunk=48,
    )
    visits = [
        Visit(prompt, params, arrives=3 * i)
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    play(engine, visits, "cuda")


def test_the_first_forward_of_a_bucket_equals_its_replays() -> None:
    # The first is launched kernel by kernel, later ones replay a graph.
    engine = tiny_engine("cuda", NGramDrafter, k=8)
    assert run(engine) == run(engine) == run(engine) == classic("cuda")
