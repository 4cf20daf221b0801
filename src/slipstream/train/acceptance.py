"""How many drafts a target accepts: rounds simulated on text that the target wrote.

A draft is accepted if and only if it is the target's own token, and the text is the target's own.
So the drafts of every anchor, made all at once, say what any round would have accepted, and the
rounds of a reply follow by walking from anchor to anchor: exact, without a verify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.train.head import Head, Weights
from slipstream.train.target import TargetModel

CHUNK_TOKENS = 1 << 15  # of one forward: the logits of a draft step take 0.5 GB at W = 8192

Noise = Callable[[int, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What the rounds of some replies accepted.

    Attributes:
        accepted: rounds by how many drafts they accepted, from none to k.
    """

    accepted: tuple[int, ...]

    @property
    def acceptance_length(self) -> float | None:
        """Accepted + 1, mean over rounds; None without rounds."""
        rounds = sum(self.accepted)
        total = sum(number * count for number, count in enumerate(self.accepted))
        return 1 + total / rounds if rounds else None

    @property
    def by_position(self) -> list[float]:
        """The chance of each draft, given that those before it were accepted."""
        reached = [sum(self.accepted[j:]) for j in range(len(self.accepted))]
        return [b / a for a, b in pairwise(reached) if a]

    def __add__(self, other: Rounds) -> Rounds:
        pairs = zip(self.accepted, other.accepted, strict=True)
        return Rounds(accepted=tuple(a + b for a, b in pairs))


def chunks(ids: Tensor) -> Iterator[list[int]]:
    """Yield row numbers of forwards of one size; what the last lacks repeats its own last row."""
    size = min(max(CHUNK_TOKENS // ids.shape[1], 1), len(ids))
    for start in range(0, len(ids), size or 1):
        rows = list(range(start, min(start + size, len(ids))))
        yield rows + rows[-1:] * (size - len(rows))


@torch.no_grad()
def accepted_drafts(
    head: Head,
    weights: Weights,
    target: TargetModel,
    vocab_map: Tensor,
    ids: Tensor,
    k: int,
    *,
    temperatures: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """Draft from every anchor and count what the target accepts.

    Args:
        weights: in the forward's precision.
        vocab_map: int64 of shape (W,).
        ids: int64 of shape (B, T), T + k at most the target's `max_len`.
        k: drafts of each anchor.
        temperatures: float32 of shape (B,); None drafts greedily.
        noise: (first, last) positions to float32 of shape (B, last - first, W), what the tokens at
            those positions were drawn with; wanted with `temperatures`.

    Returns:
        int64 of shape (B, T - 1), of the anchors at positions 1 to T - 1; tokens beyond the
        sequence match nothing.
    """
    num_anchors = ids.shape[1] - 1
    trace = target.forward(ids, head.config.feature_layers, head.config.kv_layers)
    state = head.features(weights, trace, num_anchors)
    beyond = F.pad(ids, (0, k), value=-1)
    tokens = ids[:, 1:]
    alive = torch.ones_like(tokens, dtype=torch.bool)
    accepted = torch.zeros_like(tokens)
    for j in range(k):
        cos, sin = (table[1 + j : 1 + j + num_anchors] for table in (target.cos, target.sin))
        embedded = head.embed(weights, target, tokens)
        y, state = head.step(weights, state, embedded, trace, cos, sin)
        logits = head.logits(weights, y)
        if temperatures is not None and noise is not None:
            logits.addcmul_(temperatures[:, None, None], noise(2 + j, 2 + j + num_anchors))
        tokens = vocab_map[logits.argmax(2)]
        alive = alive & (tokens == beyond[:, 2 + j : 2 + j + num_anchors])
        accepted += alive
    return accepted


def walk_rounds(accepted: Sequence[int], first: int, last: int, k: int) -> Rounds:
    """Walk the rounds of one reply.

    Args:
        accepted: of the anchors at positions 1, 2, ..., at least k drafted.
        first: position of the reply's first token, which prefill gives: the first anchor.
        last: position of its last token.
        k: drafts of a round; fewer where fewer tokens than k + 1 are left.
    """
    counts = [0] * (k + 1)
    anchor = first
    while anchor < last:
        number = min(accepted[anchor - 1], k, last - anchor - 1)
        counts[number] += 1
        anchor += number + 1
    return Rounds(accepted=tuple(counts))


def reply_spans(replies: Tensor) -> list[list[tuple[int, int]]]:
    """Return (first, last) position of each reply that is whole or cut at the end.

    Args:
        replies: bool of shape (B, T).
    """
    edges = torch.diff(F.pad(replies.int(), (1, 1))).cpu()
    spans = []
    for row in edges:
        starts, ends = (row == 1).nonzero().flatten(), (row == -1).nonzero().flatten()
        spans.append(list(zip(starts.tolist(), (ends - 1).tolist(), strict=True)))
    return spans


def judge(
    head: Head,
    weights: Weights,
    target: TargetModel,
    vocab_map: Tensor,
    ids: Tensor,
    replies: Tensor,
    k: int,
) -> Rounds:
    """Return the greedy rounds of all replies of some conversations.

    Args:
        ids: int64 of shape (B, T), on any device.
        replies: bool of shape (B, T).
    """
    total = Rounds(accepted=(0,) * (k + 1))
    spans = reply_spans(replies)
    for rows in chunks(ids):
        part = ids[rows].to(target.device, torch.long)
        accepted = accepted_drafts(head, weights, target, vocab_map, part, k).cpu().tolist()
        for row, own in zip(accepted, (spans[i] for i in dict.fromkeys(rows)), strict=False):
            for first, last in own:
                if first:  # a reply with no token before it has no feature to draft from
                    total += walk_rounds(row, first, last, k)
    return total
