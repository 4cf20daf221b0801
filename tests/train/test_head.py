"""The head in torch is the arithmetic of the format, and its rounding that of the checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from slipstream.models.loading.assistant_tensors import quantize  # noqa: E402
from slipstream.train.acceptance import accepted_drafts  # noqa: E402
from slipstream.train.head import cast, first_weights, rounded  # noqa: E402
from tests.train.worlds import drafts_one_by_one, random_ids, tiny_head, tiny_target  # noqa: E402


def test_all_anchors_at_once_draft_what_each_drafts_alone() -> None:
    target, (head, weights, vocab_map) = tiny_target(), tiny_head()
    ids, k = random_ids(3, 24), 4
    # Plant right drafts, so that acceptance of every length occurs.
    for row, anchor in ((0, 3), (1, 10), (2, 5), (2, 15)):
        for j, token in enumerate(
            drafts_one_by_one(head, weights, target, vocab_map, ids[row], anchor, k)
        ):
            if j < anchor % 5:
                ids[row, anchor + 1 + j] = token
    accepted = accepted_drafts(head, weights, target, vocab_map, ids, k)
    expected = torch.zeros_like(accepted)
    for row in range(3):
        for anchor in range(1, 24):
            drafts = drafts_one_by_one(head, weights, target, vocab_map, ids[row], anchor, k)
            truth = ids[row, anchor + 1 :].tolist()
            for draft, token in zip(drafts, truth, strict=False):
                if draft != token:
                    break
                expected[row, anchor - 1] += 1
    assert (accepted == expected).all()
    assert accepted.max() >= 3


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_in_training_is_that_of_the_checkpoint(bits: int) -> None:
    values = np.random.default_rng(0).standard_normal((24, 64), dtype=np.float32)
    values[2, 32:] = 0
    ours = rounded(torch.from_numpy(values), bits).numpy()
    np.testing.assert_allclose(ours, quantize(values, bits).dequantize(), atol=2e-7)


def test_gradients_pass_a_rounding() -> None:
    values = torch.randn(4, 32).requires_grad_()
    rounded(values, 4).sum().backward()
    assert (values.grad == 1).all()


def test_only_matrices_are_rounded() -> None:
    head, weights, _ = tiny_head()
    cast_weights = cast(head.config, weights, torch.float32, 4)
    for name in head.config.vector_shapes():
        assert (cast_weights[name] == weights[name]).all()
    for name in head.config.matrix_shapes():
        assert (cast_weights[name] != weights[name]).any()


def test_a_head_begins_as_the_targets_own_layers() -> None:
    target, (head, _, vocab_map) = tiny_target(), tiny_head()
    weights = first_weights(head.config, target, vocab_map, seed=0)
    shapes = {**head.config.matrix_shapes(), **head.config.vector_shapes()}
    assert {name: tuple(value.shape) for name, value in weights.items()} == shapes
    # This head is narrower than its target, so nothing fits; at its target's width all does.
    again = first_weights(head.config, target, vocab_map, seed=0)
    assert all((again[name] == value).all() for name, value in weights.items())
