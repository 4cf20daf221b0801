"""A draft vocabulary in clusters: equal ones, of like rows, and what their centroids learn."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from slipstream.models.loading.assistant_config import ClusterCounts  # noqa: E402
from slipstream.train.clusters import cluster_rows, means  # noqa: E402
from slipstream.train.head import Head  # noqa: E402
from slipstream.train.objective import Objective  # noqa: E402
from tests.train.worlds import CPU, random_ids, tiny_head, tiny_target  # noqa: E402

COUNT = 10


def test_clusters_are_of_one_size_and_find_what_belongs_together() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.eye(8) * 5
    truth = torch.arange(8).repeat(12)[torch.randperm(96, generator=generator)]
    rows = centres[truth] + 0.1 * torch.randn(96, 8, generator=generator)
    members = cluster_rows(rows, 8, seed=1)
    assert torch.bincount(members).tolist() == [12] * 8
    # Two first centroids may fall into one group, so not every cluster need be pure.
    purity = sum(int(torch.bincount(truth[members == c]).max()) for c in range(8)) / 96
    assert purity > 0.6
    assert (cluster_rows(rows, 8, seed=1) == members).all()
    for c, mean in enumerate(means(rows, members)):
        torch.testing.assert_close(mean, rows[members == c].mean(0))


def test_a_head_scores_the_tokens_of_its_best_clusters_alone() -> None:
    _, (head, weights, _) = tiny_target(), tiny_head()
    members = torch.arange(50) % COUNT
    config = dataclasses.replace(head.config, clusters=ClusterCounts(count=COUNT, top=3))
    weights = weights | {"centroids": means(weights["output"], members)}
    y = torch.randn(4, 7, head.config.hidden_size)
    plain = head.logits(weights, y)
    kept = Head(config, tiny_target().arch, CPU, members).logits(weights, y)
    assert ((kept == plain) | kept.isneginf()).all()
    best = (y @ weights["centroids"].T).topk(3).indices
    assert (kept.isfinite() == (best[..., None, :] == members[:, None]).any(-1)).all()


def test_only_centroids_learn_which_clusters_count() -> None:
    target, (head, weights, vocab_map) = tiny_target(), tiny_head()
    members = torch.arange(50) % COUNT
    config = dataclasses.replace(head.config, clusters=ClusterCounts(count=COUNT, top=3))
    clustered = Head(config, target.arch, CPU, members)
    weights = weights | {"centroids": means(weights["output"], members)}
    ids, token_weight = random_ids(2, 12), torch.ones(2, 12)
    trace = target.forward(ids, config.feature_layers, config.kv_layers)
    gradients = []
    for one in (head, clustered):
        leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
        Objective(one, target, vocab_map, 3, 0.5)(leaves, ids, trace, token_weight).backward()
        gradients.append({name: value.grad for name, value in leaves.items()})
    without, within = gradients
    assert without.pop("centroids") is None
    assert within.pop("centroids").abs().max() > 0
    for name, value in without.items():
        torch.testing.assert_close(within[name], value)
