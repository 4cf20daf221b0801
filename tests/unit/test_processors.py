"""Penalties, bias and bans: what they change, in what order, and what they leave alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from slipstream.engine.sampling import Processors, RowHistory, Sampler, reference_kernel
from slipstream.kernels.ops import F32
from slipstream.types import SamplingParams

VOCAB_SIZE = 12
LOGITS = np.linspace(-3, 3, VOCAB_SIZE, dtype=np.float32)


def history_of(prompt: Sequence[int], output: Sequence[int] = ()) -> RowHistory:
    history = RowHistory(prompt, vocab_size=VOCAB_SIZE)
    for token_id in output:
        history.push(token_id)
    return history


def applied(
    fields: dict[str, Any],
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    *,
    logits: F32 = LOGITS,
    **options: Any,
) -> F32:
    """Return the processed row; the raw one must stay as it was."""
    raw = logits.copy()
    ids, values = Processors(SamplingParams(**fields), **options).overrides(
        logits, history_of(prompt, output)
    )
    assert logits.tobytes() == raw.tobytes()
    assert ids.dtype == np.int32
    assert values.dtype == np.float32
    for token_id, value in zip(ids, values, strict=True):
        raw[token_id] = value
    return raw


def changed(row: F32) -> set[int]:
    return set(np.flatnonzero(row != LOGITS).tolist())


def test_defaults_change_nothing() -> None:
    assert Processors(SamplingParams(), stop_ids=[1]).idle
    assert changed(applied({}, [1, 2], [3], stop_ids=[1])) == set()


def test_repetition_penalty_sees_prompt_and_output_and_either_sign() -> None:
    row = applied({"repetition_penalty": 2.0}, [1, 1], [10])
    assert changed(row) == {1, 10}
    assert row[1] == LOGITS[1] * 2
    assert row[10] == LOGITS[10] / 2


def test_presence_and_frequency_see_the_output_alone() -> None:
    row = applied({"presence_penalty": 0.5, "frequency_penalty": 0.25}, [1, 2], [2, 3, 3, 3])
    assert changed(row) == {2, 3}
    assert row[2] == LOGITS[2] - np.float32(0.25) - np.float32(0.5)
    assert row[3] == LOGITS[3] - np.float32(0.75) - np.float32(0.5)


def test_penalties_come_before_the_bias() -> None:
    fields = {"repetition_penalty": 4.0, "frequency_penalty": 1.0, "logit_bias": {11: 1.0, 5: -2.0}}
    row = applied(fields, [4], [11, 11])
    assert changed(row) == {4, 5, 11}
    assert row[11] == np.float32(3) / 4 - 2 + 1
    assert row[5] == LOGITS[5] - 2


def test_a_bias_beats_no_ban() -> None:
    row = applied({"logit_bias": {3: 100.0}, "bad_words_ids": [[3]]})
    assert row[3] == -np.inf


def test_a_bad_word_bans_its_last_token_behind_its_prefix_only() -> None:
    fields = {"bad_words_ids": [[5, 6, 7], [6, 8], [9]]}
    assert changed(applied(fields, [1], [5])) == {9}
    assert changed(applied(fields, [1, 6])) == {8, 9}
    assert changed(applied(fields, [1, 5], [6])) == {7, 8, 9}  # the prefix may begin in the prompt
    assert changed(applied(fields, [6, 5])) == {9}
    assert changed(applied({}, [1, 5], bad_words_ids=[[5, 6]])) == {6}


def test_stop_ids_are_banned_until_min_tokens() -> None:
    fields = {"min_tokens": 2}
    for output, expected in (([], {2, 4}), ([1], {2, 4}), ([1, 1], set())):
        assert changed(applied(fields, [1, 1, 1], output, stop_ids={4, 2})) == expected


def test_a_history_pops_back_to_what_it_was() -> None:
    draw = random.Random(5)
    history = history_of([1, 2, 2])
    kept: list[int] = []
    for _ in range(200):
        if kept and draw.random() < 0.45:
            assert history.pop() == kept.pop()
        else:
            kept.append(draw.randrange(VOCAB_SIZE))
            history.push(kept[-1])
        fresh = history_of([1, 2, 2], kept)
        assert history.token_ids == fresh.token_ids
        for ours, theirs in ((history.seen, fresh.seen), (history.output, fresh.output)):
            assert ours is not None
            assert theirs is not None
            assert ours.counts.tolist() == theirs.counts.tolist()
            assert ours.distinct.tolist() == theirs.distinct.tolist()
    history.truncate(3)
    assert history.num_outputs == 0
    with pytest.raises(AssertionError):
        history.pop()


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"repetition_penalty": 5.0},
        {"bad_words_ids": [[11, 10], [10, 9], [9, 11]]},
        {"min_tokens": 3},
    ],
    ids=str,
)
def test_drafts_in_flight_are_part_of_a_row_s_history(fields: dict[str, Any]) -> None:
    """Ollama f93efe2: drafts missing from the history changed what penalties did."""
    rows = np.random.default_rng(1).normal(size=(5, VOCAB_SIZE)).astype(np.float32)
    rows[:, [9, 10, 11]] += 3
    params = SamplingParams(temperature=0.8, **fields)
    sampler = Sampler(
        params, vocab_size=VOCAB_SIZE, seed=4, stop_ids=[11], kernel=reference_kernel()
    )

    def serial() -> list[int]:
        history = sampler.history([9])
        for row in rows:
            history.push(sampler.pick(row, history, len(history)))
        return history.token_ids[1:]

    expected = serial()
    for wrong_at in range(5):
        drafts = [*expected[:wrong_at], *([(t + 1) % VOCAB_SIZE for t in expected[wrong_at:4]])]
        history = sampler.history([9])
        assert sampler.pick_run(rows, history, drafts) == expected[: wrong_at + 1]
        assert history.token_ids == [9, *expected[: wrong_at + 1]]


def test_penalties_never_reach_returned_logprobs() -> None:
    """TensorRT-LLM 17701: penalties applied in place leaked into them."""
    plain = Sampler(
        SamplingParams(logprobs=4), vocab_size=VOCAB_SIZE, seed=1, kernel=reference_kernel()
    )
    biased = Sampler(
        SamplingParams(
            logprobs=4,
            temperature=0.3,
            top_k=2,
            repetition_penalty=10.0,
            presence_penalty=2.0,
            logit_bias={3: 50.0},
            bad_words_ids=((11,),),
        ),
        vocab_size=VOCAB_SIZE,
        seed=1,
        kernel=reference_kernel(),
    )
    row = LOGITS.copy()
    before = plain.logprobs(row, 3)
    history = biased.history([1, 2, 11])
    for _ in range(5):
        history.push(biased.pick(row, history, len(history)))
    assert row.tobytes() == LOGITS.tobytes()
    assert biased.logprobs(row, 3) == before
    assert [token_id for token_id, _ in before.top] == [11, 10, 9, 8]
    assert before.rank == 9
