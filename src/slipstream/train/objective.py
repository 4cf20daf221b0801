"""What training minimises: how far the head's choices are from the target's, step by step.

At draft step j the head is asked for the target's distribution after token j of the sequence, cut
to the draft vocabulary. The sequence stands for an accepted prefix, so an anchor counts only as
long as every token up to the one asked for can be drafted. Later steps count for less, as they are
reached less often: by 0.8^j, as Medusa weighs its heads (arXiv 2401.10774), and by the chance that
the head itself gives to the tokens before, since no round reaches a step past a wrong draft.

The loss is cross-entropy. Most replies are served greedily, and a small head cannot have the whole
distribution right, so two settings move it towards the token that the target would choose: the
target's distribution may be sharpened, and the chance that the head gives to its likeliest token
may count beside (the part of LK losses that is the acceptance itself, arXiv 2602.23881).

Where the draft vocabulary is clustered, the centroids learn which clusters the target's
distribution lies in; the rest of the head does not learn from that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.train.fuse import fuse
from slipstream.train.head import Head, Weights
from slipstream.train.target import TargetModel, Trace, logits_of

STEP_WEIGHT = 0.8


class Objective:
    """The loss of a head over a batch of sequences.

    Args:
        vocab_map: int64 of shape (W,), the draft vocabulary.
        unroll: draft steps.
        survival: how much a step's weight follows the head's chance to get that far.
        sharpness: the target's logits are multiplied by it.
        choice_weight: of the chance that the head gives to the target's likeliest token.
    """

    def __init__(
        self,
        head: Head,
        target: TargetModel,
        vocab_map: Tensor,
        unroll: int,
        survival: float,
        sharpness: float = 1.0,
        choice_weight: float = 0.0,
    ) -> None:
        self._head, self._target = head, target
        self._unroll, self._survival, self._sharpness = unroll, survival, sharpness
        self._output = target.output[vocab_map]
        self._index = torch.full((target.arch.vocab_size,), -1, device=target.device)
        self._index[vocab_map] = torch.arange(len(vocab_map), device=target.device)
        self._divergence = _divergence(target.device, choice_weight)
        self._softmax = fuse(_softmax, target.device)
        self._is_member = None
        if head.members is not None and head.config.clusters is not None:
            one_hot = F.one_hot(head.members, head.config.clusters.count)
            self._is_member = one_hot.to(target.dtype)
            self._missed = fuse(_missed, target.device)

    def __call__(self, weights: Weights, ids: Tensor, trace: Trace, token_weight: Tensor) -> Tensor:
        """Return the mean loss.

        Args:
            weights: in the forward's precision.
            ids: int64 of shape (B, T).
            token_weight: float32 of shape (B, T), what predicting each token counts.
        """
        head, target, unroll = self._head, self._target, self._unroll
        num_anchors = ids.shape[1] - unroll
        with torch.no_grad():
            wanted = logits_of(trace.hidden, self._output)
            best = wanted.argmax(-1)
            asked = self._softmax(wanted, self._sharpness, target.dtype)
            shares = None if self._is_member is None else asked @ self._is_member
        embedded = head.embed(weights, target, ids)
        state = head.features(weights, trace, num_anchors)
        index = F.pad(self._index[ids], (0, 1), value=-1)
        token_weight = F.pad(token_weight, (0, 1))
        alive = torch.ones(len(ids) * num_anchors, device=ids.device)
        total, weight_sum = torch.zeros((2,), device=ids.device).unbind()
        for j in range(unroll):
            rows = slice(1 + j, 1 + j + num_anchors)
            following = slice(2 + j, 2 + j + num_anchors)
            cos, sin = target.cos[rows], target.sin[rows]
            y, state = head.step(weights, state, embedded[:, rows], trace, cos, sin)
            logits = F.linear(y, weights["output"]).flatten(0, 1)
            label = index[:, following].flatten()
            alive = alive * (label >= 0)
            weight = alive * token_weight[:, following].flatten() * STEP_WEIGHT**j
            loss, chance = self._divergence(
                logits,
                asked[:, rows].flatten(0, 1),
                best[:, rows].flatten(),
                label.clamp(min=0),
                weight,
            )
            total = total + loss
            if shares is not None:
                scores = F.linear(y.detach(), weights["centroids"]).flatten(0, 1)
                total = total + self._missed(scores, shares[:, rows].flatten(0, 1), weight)
            weight_sum = weight_sum + weight.sum()
            alive = alive * (1 - self._survival + self._survival * chance)
        return total / weight_sum.clamp(min=1e-6)


def _softmax(logits: Tensor, sharpness: float, dtype: torch.dtype) -> Tensor:
    return (logits * sharpness).softmax(-1).to(dtype)


def _missed(scores: Tensor, shares: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted cross-entropy of clusters, scores and shares of shape (N, C)."""
    z = scores.float()
    return ((z.logsumexp(1) - (shares.float() * z).sum(1)) * weight).sum()


def _divergence(device: torch.device, choice_weight: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the weighted loss as an autograd function that keeps 16-bit logits only.

    It takes logits and asked probabilities of shape (N, W), the target's likeliest tokens, labels
    and weights of shape (N,), and returns the weighted sum and the chance that the head gives to
    each label.
    """

    def losses(
        logits: Tensor, asked: Tensor, best: Tensor, label: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = logits.float()
        log_sum = z.logsumexp(1)
        chance = (z.gather(1, label[:, None]).squeeze(1) - log_sum).exp()
        chosen = (z.gather(1, best[:, None]).squeeze(1) - log_sum).exp()
        loss = log_sum - (asked.float() * z).sum(1) + choice_weight * (1 - chosen)
        return loss, log_sum, chance

    def gradient(
        logits: Tensor, asked: Tensor, best: Tensor, log_sum: Tensor, weight: Tensor
    ) -> Tensor:
        z = logits.float()
        own = (z - log_sum[:, None]).exp()
        step = own - asked.float()
        if choice_weight:
            chosen = (z.gather(1, best[:, None]) - log_sum[:, None]).exp()
            is_best = torch.arange(z.shape[1], device=z.device) == best[:, None]
            step = step + choice_weight * chosen * (own - is_best.float())
        return (step * weight[:, None]).to(logits.dtype)

    forward_of, backward_of = fuse(losses, device), fuse(gradient, device)

    class Divergence(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, logits: Tensor, asked: Tensor, best: Tensor, label: Tensor, weight: Tensor
        ) -> tuple[Tensor, Tensor]:
            loss, log_sum, chance = forward_of(logits, asked, best, label)
            ctx.save_for_backward(logits, asked, best, log_sum, weight)
            ctx.mark_non_differentiable(chance)
            return (loss * weight).sum(), chance

        @staticmethod
        def backward(ctx: Any, upstream: Tensor, _: Tensor) -> Any:
            logits, asked, best, log_sum, weight = ctx.saved_tensors
            gradients = backward_of(logits, asked, best, log_sum, weight * upstream)
            return gradients, None, None, None, None

    return Divergence.apply
