"""On the GPU a row's logits are the same bytes wherever it stands, whatever kernel serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.exact import test_row_invariance as rows
from tests.exact.test_row_invariance import (
    test_each_row_of_a_long_verify_equals_its_own_classic_step,
    test_each_row_of_a_verify_equals_its_own_classic_step,
    test_logits_and_kv_do_not_depend_on_prefill_chunks,
    test_logits_do_not_depend_on_drafts_that_follow,
    test_logits_do_not_depend_on_row_count_place_or_padding,
    test_logits_do_not_depend_on_which_pages_hold_the_context,
    test_padding_rows_write_no_kv,
    test_stale_kv_beyond_a_row_is_never_read,
    test_wanted_logits_are_the_rows_asked_for_and_equal_logits_take_the_lowest_id,
)
from tests.tiny import TinyModel, make_backend, make_rows, tiny_arch, tiny_model, tiny_tensors

__all__ = [
    "test_each_row_of_a_long_verify_equals_its_own_classic_step",
    "test_each_row_of_a_verify_equals_its_own_classic_step",
    "test_logits_and_kv_do_not_depend_on_prefill_chunks",
    "test_logits_do_not_depend_on_drafts_that_follow",
    "test_logits_do_not_depend_on_row_count_place_or_padding",
    "test_logits_do_not_depend_on_which_pages_hold_the_context",
    "test_padding_rows_write_no_kv",
    "test_stale_kv_beyond_a_row_is_never_read",
    "test_wanted_logits_are_the_rows_asked_for_and_equal_logits_take_the_lowest_id",
]

pytestmark = pytest.mark.gpu

LONG = 1500  # six splits of 256 positions
PAGES = [list(range(s, 256, 2)) for s in (0, 1)]  # 128 pages each, interleaved
HEADS: dict[str, dict[str, Any]] = {
    "two a group": {},
    "three a group, 64 wide": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "twenty a group": {"num_heads": 20, "num_kv_heads": 1},
    "256 wide": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 256},
    "128 wide": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128},
}


def long_model(heads: str, **options: Any) -> TinyModel:
    """Return a model with two prompts of LONG tokens in its pages."""
    arch = tiny_arch(context_len=4096, **HEADS[heads])
    model = tiny_model(
        make_backend("cuda", **options), tiny_tensors(arch), num_pages=256, max_rows=300
    )
    rows.prefill(model, 1, PAGES[0], LONG, chunk=257)
    rows.prefill(model, 2, PAGES[1], LONG, chunk=300)
    return model


def placements() -> Iterator[tuple[int, int]]:
    """Yield (rows, place of the probe); more than 32 rows take a context's splits in turn."""
    for count in (1, 2, 3, 5, 8, 11, 16, 17, 31, 33, 64, 300):
        for place in {0, count // 2, count - 1}:
            yield count, place


@pytest.mark.parametrize("heads", HEADS)
def test_long_contexts_do_not_depend_on_rows_or_neighbours(heads: str) -> None:
    model = long_model(heads)
    for context in (15, 255, 256, 257, 700, LONG - 1):
        expected = None
        for count, place in placements():
            ids = np.arange(count) % 90
            positions = np.random.default_rng(count).integers(-1, LONG, count)
            sequences = np.random.default_rng(place).integers(0, 2, count)
            ids[place], positions[place], sequences[place] = 11, context, 0
            # Neighbours of the probe's own sequence stay behind it, so that they change none of
            # what it reads.
            own = sequences == 0
            own[place] = False
            positions[own] = np.where(positions[own] <= context, -1, positions[own])
            logits = model.step(
                make_rows(ids, positions, PAGES, sequences=sequences, logit_rows=[place])
            ).logits[0]
            assert np.isfinite(logits).all()
            expected = expected or logits.tobytes()
            assert logits.tobytes() == expected, (context, count, place)


@pytest.mark.parametrize("tile_m", [16, 32, 64])
@pytest.mark.parametrize("kernel", ["gemv", "multirow", "tile"])
def test_kernels_and_tiles_never_change_a_byte(kernel: str, tile_m: int) -> None:
    results = []
    for options in ({}, {"kernel": kernel, "tile_m": tile_m}):
        model = long_model("two a group", **options)
        bytes_of = [
            model.step(make_rows(range(count), range(LONG, LONG + count), [PAGES[0]])).logits
            for count in (1, 2, 5, 8, 16, 32, 64)
        ]
        results.append([logits.tobytes() for logits in bytes_of])
    assert results[0] == results[1]
