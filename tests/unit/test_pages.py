"""The page pool and a sequence's use of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.pages import PagePool, pages_for
from slipstream.engine.sequence import TokenSequence
from slipstream.errors import CapacityError
from slipstream.kernels.ops import PAGE_SIZE
from tests.fake_model import FakeKV


def test_sixteen_positions_need_one_page_and_seventeen_two() -> None:
    assert [pages_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_fresh_pages_are_zeroed() -> None:
    kv = FakeKV(4)
    pool = PagePool(kv)
    first = pool.allocate(2)
    kv.tokens[first] = 9
    pool.free(first)
    assert not kv.tokens[pool.allocate(4)].any()


def test_too_many_pages_are_refused_and_none_is_taken() -> None:
    pool = PagePool(FakeKV(3))
    pool.allocate(2)
    with pytest.raises(CapacityError, match="2 KV pages are needed, 1 are free"):
        pool.allocate(2)
    assert (pool.num_free, pool.num_taken) == (1, 2)


def test_a_page_cannot_be_given_back_twice() -> None:
    pool = PagePool(FakeKV(2))
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(KeyError):
        pool.free(pages)


@given(st.lists(st.integers(0, 4), max_size=30))
def test_nobody_shares_a_page(sizes: list[int]) -> None:
    pool, held = PagePool(FakeKV(16)), []
    for size in sizes:
        if size <= pool.num_free:
            held.append(pool.allocate(size))
        elif held:
            pool.free(held.pop(0))
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken) == pool.num_taken == 16 - pool.num_free


def test_kv_length_after_rollback_is_all_tokens_but_the_anchor() -> None:
    pool = PagePool(FakeKV(8))
    sequence = TokenSequence(range(20))
    sequence.reserve(20, pool)
    sequence.extend_kv(20)
    sequence.commit([50])
    assert (sequence.kv_len, sequence.num_generated) == (20, 1)
    sequence.reserve(8, pool)  # the anchor and 7 drafts, of which 2 are accepted
    sequence.extend_kv(8)
    sequence.commit([51, 52, 53])
    assert sequence.kv_len == len(sequence.token_ids) - 1 == 23
    assert sequence.output_ids == [50, 51, 52, 53]


def test_rollback_keeps_pages_and_they_are_used_again() -> None:
    pool = PagePool(FakeKV(8))
    sequence = TokenSequence(range(PAGE_SIZE))
    sequence.reserve(PAGE_SIZE, pool)
    sequence.extend_kv(PAGE_SIZE)
    sequence.commit([1])
    for _ in range(3):
        sequence.reserve(9, pool)
        assert len(sequence.pages) == pool.num_taken == 2
        sequence.extend_kv(9)
        sequence.commit([2])


def test_release_gives_every_page_back_and_may_be_called_twice() -> None:
    pool = PagePool(FakeKV(8))
    sequence = TokenSequence(range(40))
    sequence.reserve(40, pool)
    sequence.release()
    sequence.release()
    assert (pool.num_free, len(sequence.pages), sequence.kv_len) == (8, 0, 0)


def test_a_refused_reservation_leaves_the_sequence_as_it_was() -> None:
    pool = PagePool(FakeKV(2))
    sequence = TokenSequence(range(64))
    sequence.reserve(16, pool)
    with pytest.raises(CapacityError):
        sequence.reserve(64, pool)
    assert len(sequence.pages) == pool.num_taken == 1
