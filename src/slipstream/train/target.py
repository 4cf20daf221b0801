"""The target as training sees it: a plain batched forward in torch.

It reads the canonical weights, dequantized, and hands out what a head may look at: K and V of
chosen layers, the residual streams, and the last hidden state for the target's own choices. Library
products are used throughout: nothing here is in the exact path, it only has to be fast and to agree
with the served model up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.rope import rope_tables
from slipstream.models.arch import Arch
from slipstream.models.loading import ModelFile
from slipstream.models.loading.checkpoint import EMBEDDING, NORM, OUTPUT, tensor_shapes
from slipstream.train.fuse import fuse


@dataclass(frozen=True, kw_only=True)
class TargetLayer:
    """One decoder layer; q, k, v and gate, up are stacked along the outputs."""

    attn_norm: Tensor
    qkv: Tensor
    attn_out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a forward over B sequences of T tokens leaves behind.

    Attributes:
        features: residual streams after the asked layers, each of shape (B, T, H).
        kv: keys (rotated) and values of the asked layers, each of shape (B, kv_heads, T, head_dim).
        hidden: the normed last hidden state of shape (B, T, H).
    """

    features: list[Tensor]
    kv: list[tuple[Tensor, Tensor]]
    hidden: Tensor


class TargetModel:
    """A decoder's dequantized weights on a device.

    Args:
        arch: the decoder.
        weights: each tensor by its role, float32.
        max_len: positions that a sequence may have.

    Raises:
        LoadError: the decoder is not a plain llama.
    """

    def __init__(
        self,
        arch: Arch,
        weights: dict[str, Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_len: int,
    ) -> None:
        def take(*names: str) -> Tensor:
            return torch.cat([weights[name] for name in names]).to(device, dtype)

        check_arch(arch)
        self.arch, self.device, self.dtype, self.max_len = arch, device, dtype, max_len
        self.attention = arch.uniform
        self.embedding = take(EMBEDDING)
        self.norm = take(NORM)
        self.output = self.embedding if arch.tied_embedding else take(OUTPUT)
        self.layers = []
        for index in range(arch.num_layers):
            at = f"layers.{index}."
            self.layers.append(
                TargetLayer(
                    attn_norm=take(f"{at}attn_norm"),
                    qkv=take(*(f"{at}{part}" for part in "qkv")),
                    attn_out=take(f"{at}attn_out"),
                    ffn_norm=take(f"{at}ffn_norm"),
                    gate_up=take(f"{at}gate", f"{at}up"),
                    down=take(f"{at}down"),
                )
            )
        self._project, self._finish = fuse(_project(arch), device), fuse(_finish(arch), device)
        tables = rope_tables(self.attention.frequencies, max_len)
        self.cos, self.sin = (torch.from_numpy(table).to(device) for table in tables)

    @torch.no_grad()
    def forward(
        self, ids: Tensor, feature_layers: Sequence[int] = (), kv_layers: Sequence[int] = ()
    ) -> Trace:
        """Run whole sequences.

        Args:
            ids: int64 of shape (B, T).
            feature_layers: after how many layers each residual stream is kept.
            kv_layers: layers, from 0, whose keys and values are kept.
        """
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = F.embedding(ids, self.embedding)
        streams: dict[int, Tensor] = {}
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        for index, layer in enumerate(self.layers):
            q, k, v = self.project(x, layer, cos, sin)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self.finish(x, mixed, layer)
            if index in kv_layers:
                kept[index] = k, v
            if index + 1 in feature_layers:
                streams[index + 1] = x
        return Trace(
            features=[streams[number] for number in feature_layers],
            kv=[kept[number] for number in kv_layers],
            hidden=self.normed(x, self.norm),
        )

    def project(
        self, x: Tensor, layer: TargetLayer, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q, rotated k and v of (B, T, H), each of shape (B, heads, T, head_dim)."""
        return self._project(x, layer.attn_norm, layer.qkv, cos, sin)

    def finish(self, x: Tensor, mixed: Tensor, layer: TargetLayer) -> Tensor:
        """Add a layer's attention, of shape (B, heads, T, head_dim), and its MLP to the stream."""
        return self._finish(x, mixed, layer.attn_out, layer.ffn_norm, layer.gate_up, layer.down)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm."""
        return F.rms_norm(x, weight.shape, weight, self.arch.norm_eps)


def _project(arch: Arch) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    eps, attention = arch.norm_eps, arch.uniform
    width, interleaved = attention.head_dim, attention.rope_interleaved
    num_heads, both = attention.num_heads, attention.num_heads + attention.num_kv_heads

    def project(x: Tensor, norm: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
        heads = F.linear(F.rms_norm(x, norm.shape, norm, eps), qkv)
        heads = heads.view(*x.shape[:2], -1, width).transpose(1, 2)
        turned = rotate(heads[:, :both], cos, sin, interleaved=interleaved)
        return turned[:, :num_heads], turned[:, num_heads:], heads[:, both:]

    return project


def _finish(arch: Arch) -> Callable[..., Tensor]:
    eps = arch.norm_eps

    def finish(
        x: Tensor, mixed: Tensor, attn_out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), attn_out)
        gate, up = F.linear(F.rms_norm(x, norm.shape, norm, eps), gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, down)

    return finish


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn each pair of columns by its position's angle.

    Args:
        x: of shape (..., T, head_dim).
        cos, sin: float32 of shape (T, head_dim / 2), as `kernels.rope` tabulates them.
        interleaved: as in `AttentionArch`.
    """
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, -1)
    turned = first * cos - second * sin, first * sin + second * cos
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return joined.to(x.dtype)


def logits_of(hidden: Tensor, matrix: Tensor) -> Tensor:
    """Return float32 logits of shape (..., N) from (..., H) and (N, H); 16 bits would make ties."""
    if hidden.device.type != "cuda":
        return F.linear(hidden, matrix).float()
    rows = torch.mm(hidden.flatten(0, -2), matrix.t(), out_dtype=torch.float32)
    return rows.view(*hidden.shape[:-1], -1)


def check_arch(arch: Arch) -> None:
    """Refuse a decoder that is not run here, before its weights are read.

    Raises:
        LoadError: it has features that distillation does not run; they are named.
    """
    arch.require((), "distillation")


def load_target(
    file: ModelFile, *, device: torch.device, dtype: torch.dtype, max_len: int
) -> TargetModel:
    """Read a model file for training.

    Raises:
        LoadError: the file changed since it was opened, or cannot be read.
    """
    with file.checkpoint.open() as read:
        weights = {
            role: torch.from_numpy(np.ascontiguousarray(read(role).dequantize()))
            for role in tensor_shapes(file.arch)
        }
    return TargetModel(file.arch, weights, device=device, dtype=dtype, max_len=max_len)
