"""A sequence's drafts depend on that sequence alone: not on batch-mates, k, threads or pauses.

Drafts that changed with the batch would not break a reply, but they would break the policy's
measurements and everybody's ability to reproduce a run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.drafting import DraftingModel, draft_rows, make_assistant, make_drafting
from tests.tiny import ARCH, BACKENDS, make_backend

PROMPTS = ([3, 9, 27, 81, 50] * 9, [5, 6, 7], [1, 2] * 17, [4] * 16, [8, 1] * 100)
ANCHORS = (11, 12, 13, 14, 15)
POSITIONS = tuple(map(len, PROMPTS))
MAX_K = 8


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clusters in whole tiles": {"draft_vocab_size": 64, "clusters": (4, 2)},
    "lean, clusters that cut tiles": {
        "lean": True,
        "hidden_size": ARCH.hidden_size,
        "clusters": (10, 3),
    },
}


@cache
def model_on(name: str, threads: int, head: str = "plain") -> DraftingModel:
    options = {} if name == "reference" else {"threads": threads}
    assistant = make_assistant(**HEADS[head])
    backend = make_backend(name, **options)
    return make_drafting(backend, assistant=assistant, max_rows=320, num_pages=96)


def drafted(
    model: DraftingModel, order: list[int], k: int, temperature: float
) -> dict[int, list[int]]:
    """Draft for some of the sequences, in some order, in one call."""
    table, ends = model.read(PROMPTS)
    rows = draft_rows(
        [ANCHORS[i] for i in order],
        [POSITIONS[i] for i in order],
        table[order],
        ends[order],
        k,
        temperature=temperature,
        seeds=[7 * i for i in order],
        choices=[i % 2 for i in order],
    )
    return dict(zip(order, model.draft(rows).tolist(), strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", BACKENDS)
def test_drafts_depend_on_their_own_sequence_alone(
    name: str, head: str, temperature: float
) -> None:
    alone: dict[int, list[int]] = {}
    for i in range(len(PROMPTS)):
        alone |= drafted(model_on(name, 1, head), [i], MAX_K, temperature)
    assert len({tuple(tokens) for tokens in alone.values()}) > 1
    for threads in (1, 2, 3):
        for order in ([0, 1], [1, 0], [4, 2, 0], [3, 1, 4, 0, 2], [4]):
            for k in (1, 3, MAX_K):
                found = drafted(model_on(name, threads, head), order, k, temperature)
                assert found == {i: alone[i][:k] for i in order}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_draft_leaves_the_targets_kv_as_it_is(name: str) -> None:
    model = model_on(name, 2)
    drafted(model, [0, 1, 2], 1, 0.0)
    before = [model.kv.read(layer, page) for layer in (0, 1) for page in range(20)]
    drafted(model, [0, 1, 2], MAX_K, 0.0)
    after = [model.kv.read(layer, page) for layer in (0, 1) for page in range(20)]
    for (k0, v0), (k1, v1) in zip(before, after, strict=True):
        np.testing.assert_array_equal(k0, k1)
        np.testing.assert_array_equal(v0, v1)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
def test_a_draft_beyond_what_was_compiled_is_refused(name: str) -> None:
    model = model_on(name, 1)
    table, ends = model.read(PROMPTS)
    with pytest.raises(ValueError, match="1 to 8 tokens, got 1 and 9"):
        model.draft(draft_rows([1], [45], table[:1], ends[:1], 9))
