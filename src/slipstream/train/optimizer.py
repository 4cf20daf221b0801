"""Muon for the head's inner matrices, Adam for its norms and its output matrix.

Muon (Jordan et al. 2024) steps along the nearest orthogonal matrix of the momentum, found by a few
Newton-Schulz iterations; with the scale of Liu et al. 2025 (arXiv 2502.16982, section 2.2) one
learning rate serves both. All matrices of a shape are stepped at once, which a loop over them, as
torch's own Muon has, is too slow for at this size. State is plain tensors, so that it can be stored
as safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_MOMENTUM, _DECAY = 0.95, 0.01
_BETAS, _EPS = (0.9, 0.95), 1e-10
_NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5  # Jordan's coefficients and number of iterations
_RMS = 0.2  # what an update of Adam measures, per arXiv 2502.16982


class Optimizer:
    """Steps a head's weights in place.

    Args:
        weights: float32 masters by name.
        by_adam: names that Adam steps besides all vectors.
    """

    def __init__(self, weights: Mapping[str, Tensor], by_adam: Sequence[str]) -> None:
        self._adam = [n for n, w in weights.items() if w.ndim == 1 or n in by_adam]
        groups: dict[torch.Size, list[str]] = {}
        for name, weight in weights.items():
            if name not in self._adam:
                groups.setdefault(weight.shape, []).append(name)
        self._weights, self._groups = weights, list(groups.values())
        self.state = {f"first.{name}": torch.zeros_like(w) for name, w in weights.items()}
        for name in self._adam:
            self.state[f"second.{name}"] = torch.zeros_like(weights[name])

    @torch.no_grad()
    def step(self, number: int, learning_rate: float) -> None:
        """Take step `number`, from 1, along the gradients, and drop them."""
        for names in self._groups:
            self._step_muon(names, learning_rate)
        self._step_adam(number, learning_rate)
        for weight in self._weights.values():
            weight.grad = None

    def _step_muon(self, names: Sequence[str], learning_rate: float) -> None:
        weights = [self._weights[name] for name in names]
        moments = [self.state[f"first.{name}"] for name in names]
        grads = [_grad(weight) for weight in weights]
        torch._foreach_mul_(moments, _MOMENTUM)
        torch._foreach_add_(moments, grads)
        ahead = torch.stack(torch._foreach_add(grads, moments, alpha=_MOMENTUM))
        update = orthogonal(ahead)
        size = _RMS * max(update.shape[1:]) ** 0.5
        torch._foreach_mul_(weights, 1 - learning_rate * _DECAY)
        torch._foreach_add_(weights, list(update.float().unbind()), alpha=-learning_rate * size)

    def _step_adam(self, number: int, learning_rate: float) -> None:
        weights = [self._weights[name] for name in self._adam]
        first = [self.state[f"first.{name}"] for name in self._adam]
        second = [self.state[f"second.{name}"] for name in self._adam]
        grads = [_grad(weight) for weight in weights]
        torch._foreach_lerp_(first, grads, 1 - _BETAS[0])
        torch._foreach_mul_(second, _BETAS[1])
        torch._foreach_addcmul_(second, grads, grads, 1 - _BETAS[1])
        divisor = torch._foreach_sqrt(second)
        torch._foreach_div_(divisor, (1 - _BETAS[1] ** number) ** 0.5)
        torch._foreach_add_(divisor, _EPS)
        size = -learning_rate / (1 - _BETAS[0] ** number)
        torch._foreach_addcdiv_(weights, first, divisor, value=size)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearest matrices with singular values near 1, bfloat16 of the same shape.

    Args:
        matrices: float32 of shape (S, N, K).
    """
    x: Tensor = matrices.bfloat16()
    if x.shape[1] > x.shape[2]:
        return orthogonal(matrices.mT).mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for a, b, c in _NEWTON_SCHULZ:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _grad(weight: Tensor) -> Tensor:
    assert weight.grad is not None  # every weight takes part in every loss
    return weight.grad
