"""Who gets how many rows of a forward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.engine.budget import LOGITS_BYTES, RowBudget, share_out
from slipstream.errors import ConfigError
from slipstream.types import MAX_K


def budget(vocab_size: int = 50_000, **settings: int) -> RowBudget:
    return RowBudget.of(EngineConfig(**settings), vocab_size)  # type: ignore[arg-type]


def test_by_default_every_round_fits_at_its_widest_beside_a_whole_chunk() -> None:
    limits = budget()
    assert (limits.num_seqs, limits.rows, limits.prefill) == (8, 256 + 8 * 16, 256)
    assert limits.prefill_rows(7) == 256
    assert limits.draft_rows(256 + 7, 8) >= 7 * MAX_K


def test_a_large_vocabulary_costs_draft_rows_and_no_gigabytes() -> None:
    limits = budget(vocab_size=262_144, max_num_seqs=64)
    assert limits.logits * 4 * 262_144 <= LOGITS_BYTES + 4 * 262_144 * (64 + MAX_K)
    assert limits.draft_rows(64, 64) >= MAX_K  # one sequence may still draft to the full


def test_a_row_for_every_sequence_is_the_least() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_rows must be >= max_num_seqs \(8\), got 7"):
        budget(max_batch_rows=7)
    assert budget(max_batch_rows=8).rows == 8


@given(
    num_seqs=st.integers(1, 40),
    rows=st.integers(0, 400),
    chunk=st.integers(1, 300),
    vocab=st.sampled_from([97, 50_000, 300_000]),
    data=st.data(),
)
def test_neither_prefill_nor_decoding_starves(
    num_seqs: int, rows: int, chunk: int, vocab: int, data: st.DataObject
) -> None:
    rows = rows and max(rows, num_seqs)
    limits = budget(vocab, max_num_seqs=num_seqs, max_batch_rows=rows, prefill_chunk=chunk)
    num_decoding = data.draw(st.integers(0, num_seqs))
    if num_decoding < num_seqs:
        prefill = limits.prefill_rows(num_decoding)
        assert 1 <= prefill <= min(chunk, limits.rows - num_decoding)
    else:
        prefill = 0
    drafts = limits.draft_rows(prefill + num_decoding, num_seqs)
    assert drafts >= 0
    assert prefill + num_decoding + drafts <= limits.rows
    assert num_seqs + drafts <= limits.logits


def test_the_docstring_s_example() -> None:
    assert share_out([7, 2, 7], 11) == [5, 2, 4]


@given(st.lists(st.integers(0, 15), max_size=12), st.integers(0, 100))
def test_only_the_widest_are_cut_and_only_as_far_as_needed(wanted: list[int], total: int) -> None:
    given = share_out(wanted, total)
    assert sum(given) == min(sum(wanted), total)
    cut = [count for count, want in zip(given, wanted, strict=True) if count < want]
    for count in cut:
        assert max(given) - count <= 1
