"""Drafts with norms, windows, soft-caps and clusters depend on their own sequence alone."""

from __future__ import annotations

import pytest

from tests.described_drafts import CASES, MAX_K, described_drafting, drafts_after
from tests.tiny import BACKENDS, make_backend

PROMPTS = ([3, 9, 27, 81, 50] * 9, [5, 6, 7], [1, 2] * 17, [4] * 16, [8, 1] * 75)


@pytest.mark.parametrize("kind", ["f32", "q4_1"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
def test_drafts_depend_on_their_own_sequence_alone(name: str, case: str, kind: str) -> None:
    arch, options = CASES[case]
    alone: dict[int, list[int]] = {}
    for threads in (1, 2, 3):
        backend = make_backend(name, threads=threads)
        model = described_drafting(backend, arch, kind=kind, **options)
        if not alone:
            for i in range(len(PROMPTS)):
                alone |= drafts_after(model, PROMPTS, [i], MAX_K)
            assert len({tuple(tokens) for tokens in alone.values()}) > 2
        for order in ([0, 1], [1, 0], [4, 2, 0], [3, 1, 4, 0, 2], [4]):
            for k in (1, MAX_K):
                found = drafts_after(model, PROMPTS, order, k)
                assert found == {i: alone[i][:k] for i in order}, (threads, order, k)
