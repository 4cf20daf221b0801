"""The draft vocabulary in clusters of like rows, of which a draft step looks into a few.

What a step pays for is the rows that it reads, so a vocabulary in clusters may be large: a product
with the centroids says where to look, as in the assistants of Gemma 4. All clusters are of one
size, and the centroids are trained (see `objective`): a mean finds the right row far less often.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 6  # of k-means


def cluster_rows(rows: Tensor, count: int, seed: int) -> Tensor:
    """Part the rows of a matrix into clusters of one size, near ones together.

    K-means (Lloyd 1982) whose clusters take no more than their share: rows ask for their nearest
    centroid, a full one keeps those that it is nearest to, and the others ask for their next.

    Args:
        rows: float32 of shape (W, D), on a CPU, where the result is the same on any machine.
        count: C, a divisor of W.

    Returns:
        int64 of shape (W,), each row's cluster.
    """
    generator = torch.Generator().manual_seed(seed)
    centroids = rows[torch.randperm(len(rows), generator=generator)[:count]]
    members = torch.zeros(len(rows), dtype=torch.long)
    for _ in range(_ROUNDS):
        members = _share_out(rows @ centroids.T - centroids.square().sum(1) / 2)
        centroids = means(rows, members)
    return members


def means(rows: Tensor, members: Tensor) -> Tensor:
    """Return the mean of each cluster's rows, of shape (C, D), clusters being of one size."""
    count = int(members.max()) + 1
    sums = torch.zeros(count, rows.shape[1], device=rows.device).index_add_(0, members, rows)
    mean: Tensor = sums * (count / len(rows))
    return mean


def _share_out(nearness: Tensor) -> Tensor:
    """Return the cluster of each row, of equal size, by nearness of shape (W, C)."""
    size, count = nearness.shape
    room = size // count
    wishes = nearness.argsort(dim=1, descending=True, stable=True)
    turn = torch.zeros(size, dtype=torch.long)
    while True:
        asked = wishes.gather(1, turn[:, None]).squeeze(1)
        # By cluster, the nearest first; who stands behind `room` others asks for the next.
        order = nearness.gather(1, asked[:, None]).squeeze(1).argsort(descending=True, stable=True)
        order = order[asked[order].argsort(stable=True)]
        begins = torch.bincount(asked, minlength=count).cumsum(0).roll(1)
        begins[0] = 0
        place = torch.arange(size) - begins[asked[order]]
        refused = order[place >= room]
        if not len(refused):
            return asked
        turn[refused] += 1
