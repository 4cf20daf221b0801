"""Drafts on the GPU with all that a description has: norms, windows, soft-caps, clusters.

Logits are near those of the reference, drafts the same in any company, and clusters are marked as a
stable sort would mark them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.kernels.ops import Backend, Clusters, Weight
from slipstream.kernels.rowwise.draft import ReferenceDraftOps
from tests.described_drafts import CASES, MAX_K, described_drafting, drafts_after
from tests.drafting import DraftingModel
from tests.tiny import make_backend

pytestmark = pytest.mark.gpu

# The last one is in a second split, and so is the beginning of what its windows show.
PROMPTS = ([3, 9, 27, 81, 50] * 9, [5, 6, 7], [1, 2] * 17, [4] * 16, [8, 1] * 75, [7, 61, 2] * 133)
MAX_ROWS = 704
ORDER = list(range(len(PROMPTS)))


def drafting(backend: Backend, case: str, kind: str) -> DraftingModel:
    arch, options = CASES[case]
    sizes = {"num_pages": 180, "max_rows": MAX_ROWS}
    return described_drafting(backend, arch, kind=kind, biased=False, **sizes, **options)


def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """Collect what each draft step picks from, on the GPU and on the reference."""
    import slipstream.kernels.cuda.backend as cuda
    import slipstream.kernels.reference as reference
    from slipstream.kernels.cuda.draft import DraftRecorder

    ours: list[Any] = []
    theirs: list[Any] = []

    class OurOps(DraftRecorder):
        def pick(self, x: Any, weight: Weight, *others: Any) -> None:
            ours.append(self.linear(x, weight))  # a buffer that is held is nobody else's
            super().pick(x, weight, *others)

    class TheirOps(ReferenceDraftOps):
        def pick(self, x: Any, weight: Weight, *others: Any) -> None:
            theirs.append(self.linear(x, weight))
            super().pick(x, weight, *others)

    monkeypatch.setattr(cuda, "DraftRecorder", OurOps)
    monkeypatch.setattr(reference, "ReferenceDraftOps", TheirOps)
    return ours, theirs


@pytest.mark.parametrize("case", CASES)
def test_drafts_and_logits_are_near_the_references(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = make_backend("cuda")
    seen = watch(monkeypatch)
    slow = make_backend("reference", bfloat16_activations=True)
    found = [
        drafts_after(drafting(backend, case, "f32"), PROMPTS, ORDER, MAX_K)
        for backend in (fast, slow)
    ]
    ours, theirs = (np.array([drafts[i] for i in ORDER]) for drafts in found)
    logits = [
        np.stack([step.tensor[: len(ORDER)].cpu().numpy() for step in seen[0]]),
        np.stack([step.numpy() for step in seen[1]]),
    ]
    # What a step picks from is comparable as long as the steps before picked the same.
    same = np.cumprod(ours == theirs, axis=1)
    alike = np.column_stack([np.ones(len(ORDER)), same])[:, :MAX_K].astype(bool).T
    error = np.abs(logits[0] - logits[1])[alike]
    size = logits[1].std()
    print(f"{case}: mean {error.mean() / size:.2e}, max {error.max() / size:.2e}")
    assert size > 0.3
    assert error.mean() < 1e-2 * size
    assert error.max() < 8e-2 * size
    # A near tie may fall either way.
    assert same[:, 0].sum() >= len(ORDER) - 1
    assert same.mean() > 0.7


@pytest.mark.parametrize("kind", ["f32", "q4_1"])
@pytest.mark.parametrize("case", CASES)
def test_drafts_depend_on_their_own_sequence_alone(case: str, kind: str) -> None:
    model = drafting(make_backend("cuda"), case, kind)
    alone: dict[int, list[int]] = {}
    for i in ORDER:
        alone |= drafts_after(model, PROMPTS, [i], MAX_K)
    assert len({tuple(tokens) for tokens in alone.values()}) > 2
    for order in ([0, 1], [1, 0], [5, 4, 2, 0], [3, 1, 4, 0, 2], [4], ORDER):
        for k in (1, MAX_K):
            for _ in range(2):  # launched, then replayed as a graph
                found = drafts_after(model, PROMPTS, order, k)
                assert found == {i: alone[i][:k] for i in order}, (order, k)


@pytest.mark.parametrize(("count", "top"), [(1, 1), (5, 2), (256, 8), (300, 299), (2048, 32)])
def test_clusters_are_marked_as_a_stable_sort_marks_them(count: int, top: int) -> None:
    make_backend("cuda")
    import torch

    from slipstream.kernels.cuda.compiler import SOURCES, compile_kernels
    from slipstream.kernels.cuda.draft import CLUSTERS, THREADS
    from slipstream.kernels.cuda.kernels import DRAFT_KERNELS

    random = np.random.default_rng(count)
    scores = random.standard_normal((6, count)).astype(np.float32)
    scores[1] = np.round(scores[1])  # ties
    scores[2] = np.where(random.random(count) < 0.5, np.float32(0), np.float32(-0.0))
    scores[3] = -np.inf
    scores[4, count // 2 :] = -np.inf
    scores[5, : count - top] = np.nan  # there are enough others
    module = compile_kernels(SOURCES / "draft.cu", names=DRAFT_KERNELS)
    marks = torch.full(scores.shape, 7, dtype=torch.int32, device="cuda")
    module.kernel("mark_clusters").launch(
        (-(-count // CLUSTERS), len(scores), 1),
        (THREADS, 1, 1),
        (torch.from_numpy(scores).cuda(), marks, count, top),
    )
    for row, found in zip(scores, marks.cpu().numpy(), strict=True):
        expected = np.zeros(count, np.int32)
        expected[np.argsort(-row, kind="stable")[:top]] = 1
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["f32", "q4_1"])
def test_only_tokens_of_a_rows_best_clusters_are_picked(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_backend("cuda")
    import slipstream.kernels.cuda.backend as cuda
    from slipstream.kernels.cuda.draft import DraftRecorder

    seen: list[tuple[Any, Any, Clusters]] = []

    class Watched(DraftRecorder):
        def pick(self, x: Any, weight: Weight, ids: Any, clusters: Any = None) -> None:
            scores = self.linear(x, clusters.centroids), self.linear(x, weight)
            seen.append((*scores, clusters))
            super().pick(x, weight, ids, clusters)

    monkeypatch.setattr(cuda, "DraftRecorder", Watched)
    model = drafting(make_backend("cuda"), "clusters", kind)
    found = drafts_after(model, PROMPTS, ORDER, MAX_K)
    left_out = 0
    for step, (centroids, output, clusters) in enumerate(seen):
        scores, logits = (value.tensor.cpu().numpy() for value in (centroids, output))
        for row in ORDER:
            best = np.argsort(-scores[row], kind="stable")[: clusters.top]
            allowed = np.isin(clusters.members, best)
            token = found[row][step] // 2  # the head knows every other token
            assert allowed[token]
            if row % 2 == 0:  # not sampled
                assert token == np.where(allowed, logits[row], -np.inf).argmax()
                left_out += int(token != logits[row].argmax())
    assert left_out > 0
