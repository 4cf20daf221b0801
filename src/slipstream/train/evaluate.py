"""Acceptance on given prompts: the target's replies, then the rounds that a head would have had.

Greedy replies and drafts, or sampled ones: then a draft is drawn with the noise of its position,
as the engine's drafters do (arXiv 2408.07978), and the reply is judged under that very noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.acceptance import (
    Rounds,
    accepted_drafts,
    chunks,
    reply_spans,
    walk_rounds,
)
from slipstream.train.generate import REPLY, Opening, converse, gumbel
from slipstream.train.head import Head, Weights
from slipstream.train.target import TargetModel
from slipstream.train.turns import TurnScript

_SHORT = 256  # tokens of a prompt: longer ones make a batch of their own


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, the reply's turn opened."""

    category: str
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Replies:
    """The target's replies to some prompts, of like length.

    Attributes:
        prompts: what was asked.
        ids: int64 of shape (B, T).
        spans: position of each reply's first and last token.
        temperature: what they were drawn at.
        seed: position p had noise `gumbel(B, V, seed + p)`.
    """

    prompts: list[Prompt]
    ids: Tensor
    spans: list[tuple[int, int]]
    temperature: float
    seed: int


def write_replies(
    target: TargetModel,
    script: TurnScript,
    prompts: Sequence[Prompt],
    max_tokens: int,
    temperature: float,
    seed: int,
    report: Callable[[float], None] = lambda part: None,
) -> list[Replies]:
    """Let the target answer, at most `max_tokens` each."""
    groups = [
        [prompt for prompt in prompts if (len(prompt.ids) > _SHORT) is is_long]
        for is_long in (False, True)
    ]
    written = []
    for group in filter(None, groups):
        openings = [
            Opening(
                ids=prompt.ids,
                role=REPLY,
                temperatures=(temperature, temperature),
                limits=(max_tokens, max_tokens),
            )
            for prompt in group
        ]
        length = max(len(prompt.ids) for prompt in group) + max_tokens
        made = converse(target, script, openings, length, seed, report)
        # The first reply alone, and of that no end marker that the limit put there.
        spans = [
            (first, min(last, first + max_tokens - 1))
            for first, last in (own[0] for own in reply_spans(made.replies))
        ]
        written.append(
            Replies(prompts=group, ids=made.ids, spans=spans, temperature=temperature, seed=seed)
        )
    return written


def judge_replies(
    head: Head,
    weights: Weights,
    target: TargetModel,
    vocab_map: Tensor,
    written: Sequence[Replies],
    max_k: int,
) -> dict[str, dict[int, Rounds]]:
    """Return, for each category, the rounds at each k from 1 to `max_k`."""
    found: dict[str, dict[int, Rounds]] = {}
    for replies in written:
        for rows in chunks(replies.ids):
            accepted = _accepted(head, weights, target, vocab_map, replies, rows, max_k).tolist()
            for row, number in zip(accepted, dict.fromkeys(rows), strict=False):
                own = found.setdefault(replies.prompts[number].category, {})
                for k in range(1, max_k + 1):
                    none = Rounds(accepted=(0,) * (k + 1))
                    own[k] = own.get(k, none) + walk_rounds(row, *replies.spans[number], k)
    return found


def _accepted(
    head: Head,
    weights: Weights,
    target: TargetModel,
    vocab_map: Tensor,
    replies: Replies,
    rows: Sequence[int],
    k: int,
) -> Tensor:
    ids = replies.ids[rows].to(target.device)
    if not replies.temperature:
        return accepted_drafts(head, weights, target, vocab_map, ids, k)
    batch, size = len(replies.ids), target.arch.vocab_size

    def noise(first: int, last: int) -> Tensor:
        drawn = (
            gumbel(batch, size, replies.seed + position, target.device)[rows][:, vocab_map]
            for position in range(first, last)
        )
        return torch.stack(list(drawn), 1)

    temperatures = torch.full((len(ids),), replies.temperature, device=target.device)
    return accepted_drafts(
        head, weights, target, vocab_map, ids, k, temperatures=temperatures, noise=noise
    )
