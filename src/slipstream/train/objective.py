"""What training minimises: how far the head's choices are from the target's, step by step.

At draft step j the head is asked for the target's distribution after token j of the sequence, cut
to the draft vocabulary. The sequence stands for an accepted prefix, so an anchor counts only as
long as every token up to the one asked for can be drafted. Later steps count for less, as they are
reached less often: 0.8^j, as in EAGLE-2's and Medusa's training (arXiv 2406.16858, 2401.10774).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.train.fuse import fuse
from slipstream.train.head import Head, Weights
from slipstream.train.target import TargetModel, Trace

STEP_WEIGHT = 0.8


class Objective:
    """The loss of a head over a batch of sequences.

    Args:
        vocab_map: int64 of shape (W,), the draft vocabulary.
        unroll: draft steps.
        hard: share of the loss on the sequence's own token.
    """

    def __init__(
        self, head: Head, target: TargetModel, vocab_map: Tensor, unroll: int, hard: float
    ) -> None:
        self._head, self._target = head, target
        self._unroll, self._hard = unroll, hard
        self._output = target.output[vocab_map]
        self._index = torch.full((target.arch.vocab_size,), -1, device=target.device)
        self._index[vocab_map] = torch.arange(len(vocab_map), device=target.device)
        self._divergence = _divergence(target.device)

    def __call__(self, weights: Weights, ids: Tensor, trace: Trace, token_weight: Tensor) -> Tensor:
        """Return the mean loss.

        Args:
            weights: in the forward's precision.
            ids: int64 of shape (B, T).
            token_weight: float32 of shape (B, T), what predicting each token counts.
        """
        head, target, unroll = self._head, self._target, self._unroll
        num_anchors = ids.shape[1] - unroll
        wanted = F.linear(trace.hidden, self._output).detach()
        embedded = head.embed(weights, target, ids)
        state = head.features(weights, trace, num_anchors)
        index = F.pad(self._index[ids], (0, 1), value=-1)
        alive = torch.ones_like(ids[:, :num_anchors], dtype=torch.float32)
        token_weight = F.pad(token_weight, (0, 1))
        total = torch.zeros((), device=ids.device)
        weight_sum = torch.zeros((), device=ids.device)
        for j in range(unroll):
            rows = slice(1 + j, 1 + j + num_anchors)
            following = slice(2 + j, 2 + j + num_anchors)
            cos, sin = target.cos[rows], target.sin[rows]
            y, state = head.step(weights, state, embedded[:, rows], trace, cos, sin)
            logits = F.linear(y, weights["output"]).flatten(0, 1)
            label = index[:, following]
            alive = alive * (label >= 0)
            weight = (alive * token_weight[:, following] * STEP_WEIGHT**j).flatten()
            total = total + self._divergence(
                logits,
                wanted[:, rows].flatten(0, 1),
                label.flatten().clamp(min=0),
                weight,
                self._hard,
            )
            weight_sum = weight_sum + weight.sum()
        return total / weight_sum.clamp(min=1e-6)


def _divergence(device: torch.device) -> Any:
    """Return weighted cross-entropy as an autograd function that keeps 16-bit logits only."""

    def losses(logits: Tensor, wanted: Tensor, label: Tensor, hard: float) -> tuple[Tensor, Tensor]:
        z, t = logits.float(), wanted.float()
        log_sum = z.logsumexp(1)
        soft = (t.softmax(1) * z).sum(1)
        own = z.gather(1, label[:, None]).squeeze(1)
        return log_sum - (1 - hard) * soft - hard * own, log_sum

    def gradient(
        logits: Tensor, wanted: Tensor, label: Tensor, log_sum: Tensor, weight: Tensor, hard: float
    ) -> Tensor:
        z = logits.float()
        asked = (1 - hard) * wanted.float().softmax(1)
        columns = torch.arange(z.shape[1], device=z.device)
        asked = asked + hard * (columns[None] == label[:, None])
        return (((z - log_sum[:, None]).exp() - asked) * weight[:, None]).to(logits.dtype)

    forward_of, backward_of = fuse(losses, device), fuse(gradient, device)

    class Divergence(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, logits: Tensor, wanted: Tensor, label: Tensor, weight: Tensor, hard: float
        ) -> Tensor:
            loss, log_sum = forward_of(logits, wanted, label, hard)
            ctx.save_for_backward(logits, wanted, label, log_sum, weight)
            ctx.hard = hard
            return (loss * weight).sum()

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Any:
            logits, wanted, label, log_sum, weight = ctx.saved_tensors
            scaled = weight * upstream
            return backward_of(logits, wanted, label, log_sum, scaled, ctx.hard), *[None] * 4

    return Divergence.apply
