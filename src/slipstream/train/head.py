"""The assistant's head in torch: the arithmetic that the engine records as ops, for all anchors.

A sequence of T tokens holds T - 1 anchors, the tokens at positions 1 to T - 1. Anchor p reads the
target's residual streams at p - 1 and attends to the target's keys below p, which over all anchors
in order is plain causal attention. Draft step j takes the token at p + j, at that position, and the
same keys; nothing but its own post-projection carries over from the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.arch import Arch
from slipstream.models.loading.assistant_config import AssistantConfig
from slipstream.models.loading.assistant_tensors import GROUP
from slipstream.train.clusters import means
from slipstream.train.fuse import fuse
from slipstream.train.target import TargetModel, Trace, logits_of, rotate

Weights = Mapping[str, Tensor]


class Head:
    """The forward of a head of a given shape.

    Args:
        arch: the target's decoder.
        members: int64 of shape (W,), each draft token's cluster, where there are clusters.
    """

    def __init__(
        self,
        config: AssistantConfig,
        arch: Arch,
        device: torch.device,
        members: Tensor | None = None,
    ) -> None:
        self.config, self._eps = config, arch.norm_eps
        self.members = None if members is None else members.to(device)
        self._layer = fuse(_layer(arch), device)

    def embed(self, weights: Weights, target: TargetModel, ids: Tensor) -> Tensor:
        """Return the tokens' part of the input, of shape (*ids.shape, D)."""
        rows = F.embedding(ids, target.embedding)
        if self.config.lean:
            return rows * self.config.embedding_scale
        return F.linear(self._normed(rows, weights["embed.norm"]), weights["embed.weight"])

    def features(self, weights: Weights, trace: Trace, num_anchors: int) -> Tensor:
        """Return the first state of anchors 1 to `num_anchors`, of shape (B, A, D)."""
        parts = [
            F.linear(
                self._normed(stream[:, :num_anchors], weights[f"features.{i}.norm"]),
                weights[f"features.{i}.weight"],
            )
            for i, stream in enumerate(trace.features)
        ]
        return torch.stack(parts).sum(0)

    def step(
        self,
        weights: Weights,
        state: Tensor,
        embedded: Tensor,
        trace: Trace,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Take one draft step of every anchor.

        Args:
            state: of shape (B, A, D), from `features` or the step before.
            embedded: the tokens' part, of shape (B, A, D).
            cos, sin: of the tokens' positions, of shape (A, head_dim / 2).

        Returns:
            What the output matrix takes, and the next state, each of shape (B, A, D).
        """
        num_anchors = state.shape[1]
        x = embedded + F.linear(self._normed(state, weights["state.norm"]), weights["state.weight"])
        for n, (k, v) in enumerate(trace.kv):
            names = ("attn_norm", "q", "attn_out", "ffn_norm", "gate", "up", "down")
            own = [weights[f"layers.{n}.{name}"] for name in names]
            x = self._layer(x, k[:, :, :num_anchors], v[:, :, :num_anchors], cos, sin, *own)
        y = self._normed(x, weights["norm"])
        return y, x if self.config.lean else F.linear(y, weights["post"])

    def logits(self, weights: Weights, y: Tensor) -> Tensor:
        """Return float32 scores of the draft tokens, -inf outside of the best clusters.

        Args:
            y: of shape (..., D), what `step` returned.
        """
        logits = logits_of(y, weights["output"])
        if self.config.clusters is None or self.members is None:
            return logits
        scores = logits_of(y, weights["centroids"])
        best = scores.topk(self.config.clusters.top).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        return logits.masked_fill_(~chosen[..., self.members], -torch.inf)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)


def _layer(arch: Arch) -> Callable[..., Tensor]:
    eps, attention = arch.norm_eps, arch.uniform
    width, interleaved = attention.head_dim, attention.rope_interleaved

    def layer(
        x: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        attn_norm: Tensor,
        q: Tensor,
        attn_out: Tensor,
        ffn_norm: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
    ) -> Tensor:
        heads = F.linear(F.rms_norm(x, attn_norm.shape, attn_norm, eps), q)
        heads = heads.view(*x.shape[:2], -1, width).transpose(1, 2)
        turned = rotate(heads, cos, sin, interleaved=interleaved)
        mixed = F.scaled_dot_product_attention(turned, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), attn_out)
        y = F.rms_norm(x, ffn_norm.shape, ffn_norm, eps)
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)

    return layer


def first_weights(
    config: AssistantConfig,
    target: TargetModel,
    vocab_map: Tensor,
    seed: int,
    members: Tensor | None = None,
) -> dict[str, Tensor]:
    """Draw a head's weights, float32 on the target's device.

    Where shapes allow, a layer starts as the target's own layer whose KV it reads, so that its
    queries fit the keys, a narrower MLP with the first of its neurons, the output as the target's
    own rows, a cluster's centroid as their mean, and the embedding as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.ones(shape) for name, shape in config.vector_shapes().items()}
    for name, (n, k) in config.matrix_shapes().items():
        weights[name] = torch.randn(n, k, generator=generator) * (0.5 / k**0.5)
    weights = {name: value.to(target.device) for name, value in weights.items()}
    taken = {"output": target.output[vocab_map], "norm": target.norm}
    if members is not None and target.output.shape[1] == config.hidden_size:
        taken["centroids"] = means(target.output[vocab_map].float(), members.to(target.device))
    if config.hidden_size == config.target.hidden_size and not config.lean:
        taken["embed.weight"] = torch.eye(config.hidden_size)
    for n, m in enumerate(config.kv_layers):
        layer, at = target.layers[m], f"layers.{n}."
        gate, up = (matrix[: config.ffn_size] for matrix in layer.gate_up.chunk(2))
        taken |= {
            f"{at}attn_norm": layer.attn_norm,
            f"{at}q": layer.qkv[: target.attention.q_size],
            f"{at}attn_out": layer.attn_out,
            f"{at}ffn_norm": layer.ffn_norm,
            f"{at}gate": gate,
            f"{at}up": up,
            f"{at}down": layer.down[:, : config.ffn_size],
        }
    for name, value in taken.items():
        if value.shape == weights[name].shape:
            weights[name] = value.to(target.device, torch.float32, copy=True)
    return weights


def cast(
    config: AssistantConfig, weights: Weights, dtype: torch.dtype, bits: int | None = None
) -> dict[str, Tensor]:
    """Return the weights in the forward's precision, matrices rounded to `bits` on the way."""
    matrices = config.matrix_shapes()
    return {
        name: (rounded(value, bits) if bits and name in matrices else value).to(dtype)
        for name, value in weights.items()
    }


def rounded(values: Tensor, bits: int) -> Tensor:
    """Round a matrix as a checkpoint does; the gradient passes as if it had not been rounded.

    The same numbers as `models.loading.assistant_tensors.quantize`, dequantized.
    """
    with torch.no_grad():
        groups = values.view(len(values), -1, GROUP)
        low = torch.zeros_like(groups[:, :, :1])
        if bits == 4:
            lowest = groups.amin(2, keepdim=True)
            low = lowest.half().float()
            scale = ((groups.amax(2, keepdim=True) - lowest) / 15).half().float()
            bounds = 0, 15
        else:
            scale = (groups.abs().amax(2, keepdim=True) / 127).half().float()
            bounds = -128, 127
        codes = ((groups - low) / torch.where(scale == 0, 1, scale)).round().clamp(*bounds)
        error: Tensor = (codes * scale + low).flatten(1) - values
    return values + error
