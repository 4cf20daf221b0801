"""The draft vocabulary: the tokens that a model's own replies are made of.

The output matrix of a small model is larger than a head, and most of its rows are never the answer.
The W commonest tokens of the model's own text, a reply's counting for more than a user's, keep
nearly all of the text (FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from slipstream.train.corpus import Shard

REPLY_COUNT = 8  # of a token in a reply; one in the user's text counts once


def count_tokens(shards: Iterable[Shard], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return how often each token stands in replies and elsewhere, each int64 of shape (V,)."""
    counts = torch.zeros(2, vocab_size, dtype=torch.long)
    for shard in shards:
        for row, mask in enumerate((shard.replies, ~shard.replies)):
            counts[row] += torch.bincount(shard.ids[mask], minlength=vocab_size)
    return counts[0], counts[1]


def choose_vocabulary(
    in_replies: Tensor, elsewhere: Tensor, size: int, always: Iterable[int]
) -> tuple[Tensor, float]:
    """Choose the draft vocabulary.

    Args:
        size: W; at most V.
        always: ids that are in it whatever their count, e.g. those that end a reply.

    Returns:
        The ascending ids, int64 of shape (W,), and the share of the replies' tokens among them.
    """
    score = in_replies * REPLY_COUNT + elsewhere
    score[list(always)] = int(score.max()) + 1
    # A stable sort: equal counts resolve to the lowest id, on any machine.
    chosen = score.sort(descending=True, stable=True).indices[:size].sort().values
    return chosen, float(in_replies[chosen].sum() / in_replies.sum().clamp(min=1))
