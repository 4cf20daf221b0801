"""The loss and its hand-written gradient."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from slipstream.train.objective import STEP_WEIGHT, Objective  # noqa: E402
from tests.train.worlds import random_ids, tiny_head, tiny_target  # noqa: E402

UNROLL = 3


@pytest.mark.parametrize(
    ("survival", "sharpness", "choice_weight"), [(0.0, 1.0, 0.0), (0.5, 1.0, 0.0), (0.5, 2.0, 1.5)]
)
def test_loss_and_gradient_are_those_of_plain_torch(
    survival: float, sharpness: float, choice_weight: float
) -> None:
    target, (head, weights, vocab_map) = tiny_target(), tiny_head()
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    ids = random_ids(2, 12)
    token_weight = torch.rand(2, 12)
    trace = target.forward(ids, head.config.feature_layers, head.config.kv_layers)
    objective = Objective(head, target, vocab_map, UNROLL, survival, sharpness, choice_weight)
    loss = objective(weights, ids, trace, token_weight)
    loss.backward()
    found = {name: value.grad.clone() for name, value in weights.items()}

    wanted = F.linear(trace.hidden, target.output[vocab_map])
    asked, best = (wanted * sharpness).softmax(-1), wanted.argmax(-1)
    num_anchors = 12 - UNROLL
    state = head.features(weights, trace, num_anchors)
    total, weight_sum = torch.zeros(()), torch.zeros(())
    alive = torch.ones(2, num_anchors)
    for j in range(UNROLL):
        rows = slice(1 + j, 1 + j + num_anchors)
        embedded = head.embed(weights, target, ids[:, rows])
        y, state = head.step(weights, state, embedded, trace, target.cos[rows], target.sin[rows])
        log_chances = F.linear(y, weights["output"]).log_softmax(-1)
        for row in range(2):
            for i in range(num_anchors):
                at = 1 + i + j + 1
                is_there = at < 12 and bool((vocab_map == ids[row, at]).any())
                if not is_there:
                    alive[row, i] = 0
                    continue
                weight = alive[row, i] * token_weight[row, at] * STEP_WEIGHT**j
                total = total - weight * (asked[row, at - 1] * log_chances[row, i]).sum()
                missed = 1 - log_chances[row, i, best[row, at - 1]].exp()
                total = total + weight * choice_weight * missed
                weight_sum = weight_sum + weight
                label = int((vocab_map == ids[row, at]).nonzero())
                chance = float(log_chances[row, i, label].exp().detach())
                alive[row, i] = alive[row, i] * (1 - survival + survival * chance)
    expected = total / weight_sum
    for value in weights.values():
        value.grad = None
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-3, atol=1e-6)
