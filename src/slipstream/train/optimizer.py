"""Muon for the head's inner matrices, Adam for its norms and its output matrix.

Muon (Jordan et al. 2024) steps along the nearest orthogonal matrix of the momentum, found by a few
Newton-Schulz iterations; with the scale of Liu et al. 2025 (arXiv 2502.16982, section 2.2) one
learning rate serves both. All matrices of a shape are stepped at once, which a loop over them, as
torch's own Muon has, is too slow for at this size. State is plain tensors, so that it can be stored
as safetensors, and so are the numbers that change from step to step, so that a step can be recorded
and replayed.
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
    def step(self, gradients: Mapping[str, Tensor], pace: Tensor) -> None:
        """Take a step.

        Args:
            gradients: of every weight.
            pace: what `pace` returns for this step, on the weights' device.
        """
        for names in self._groups:
            self._step_muon(names, gradients, pace)
        self._step_adam(gradients, pace)

    def _step_muon(
        self, names: Sequence[str], gradients: Mapping[str, Tensor], pace: Tensor
    ) -> None:
        weights = [self._weights[name] for name in names]
        moments = [self.state[f"first.{name}"] for name in names]
        grads = [gradients[name] for name in names]
        torch._foreach_mul_(moments, _MOMENTUM)
        torch._foreach_add_(moments, grads)
        ahead = torch.stack(torch._foreach_add(grads, moments, alpha=_MOMENTUM))
        size = _RMS * max(ahead.shape[1:]) ** 0.5
        update = orthogonal(ahead).float() * (pace[0] * -size)
        torch._foreach_mul_(weights, 1 - pace[0] * _DECAY)
        torch._foreach_add_(weights, list(update.unbind()))

    def _step_adam(self, gradients: Mapping[str, Tensor], pace: Tensor) -> None:
        weights = [self._weights[name] for name in self._adam]
        first = [self.state[f"first.{name}"] for name in self._adam]
        second = [self.state[f"second.{name}"] for name in self._adam]
        grads = [gradients[name] for name in self._adam]
        torch._foreach_lerp_(first, grads, 1 - _BETAS[0])
        torch._foreach_mul_(second, _BETAS[1])
        torch._foreach_addcmul_(second, grads, grads, 1 - _BETAS[1])
        divisor = torch._foreach_sqrt(second)
        torch._foreach_mul_(divisor, pace[2])
        torch._foreach_add_(divisor, _EPS)
        update = torch._foreach_div(first, divisor)
        torch._foreach_mul_(update, pace[1])
        torch._foreach_add_(weights, update)


def pace(number: int, learning_rate: float) -> Tensor:
    """Return step `number`'s sizes, from 1: float32 of shape (3,), on the CPU.

    The learning rate, and Adam's correction for a young state: of the step and of its divisor.
    """
    return torch.tensor(
        [
            learning_rate,
            -learning_rate / (1 - _BETAS[0] ** number),
            (1 - _BETAS[1] ** number) ** -0.5,
        ]
    )


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
