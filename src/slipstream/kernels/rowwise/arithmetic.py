"""The arithmetic of single rows: rounding, norms, activations, rotation, attention."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor as TorchTensor

from slipstream.kernels.ops import PAGE_SIZE
from slipstream.kernels.rowwise.pages import KVPages
from slipstream.models.arch import Activation

ACTIVATION_GROUP = 32  # columns that share one int8 scale, as the fast CPU kernels have it
# What a product does to an input row, told whether its weights are quantized.
Rounding = Callable[[TorchTensor, bool], TorchTensor]
Pages = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


def rounding(activation_groups: bool, bfloat16_activations: bool) -> Rounding:
    """Return what a product does to an input row first."""
    if bfloat16_activations:
        return lambda row, _quantized: row.to(torch.bfloat16).float()
    if activation_groups:
        return lambda row, quantized: round_to_int8(row) if quantized else row
    return lambda row, _quantized: row


def round_to_int8(row: TorchTensor) -> TorchTensor:
    """Return a row of shape (K,) rounded to int8 per group of 32 columns and scaled back.

    The scale is the group's largest magnitude / 127 and 0 for an all-zero group; ties go to even.
    """
    groups = torch.nn.functional.pad(row, (0, -len(row) % ACTIVATION_GROUP))
    groups = groups.view(-1, ACTIVATION_GROUP)
    largest = groups.abs().amax(dim=1, keepdim=True)
    # Multiplied by the inverse, not divided: the kernels' own arithmetic, ties included.
    codes = torch.round(groups * torch.where(largest > 0, 127 / largest, 0.0))
    return (codes * (largest / 127)).flatten()[: len(row)].clone()


def by_row(op: Callable[[TorchTensor], TorchTensor], x: TorchTensor) -> TorchTensor:
    """Apply `op` to a fresh copy of each row."""
    return torch.stack([op(row.clone()) for row in x])


def normed(row: TorchTensor, weight: TorchTensor, eps: float) -> TorchTensor:
    """Return the RMS norm of one row."""
    return row / torch.sqrt((row * row).mean() + eps) * weight


def normed_heads(heads: TorchTensor, weight: TorchTensor | None, eps: float) -> TorchTensor:
    """Return the RMS norm of each head of one row, (heads, D)."""
    scaled = heads / torch.sqrt((heads * heads).mean(dim=1, keepdim=True) + eps)
    return scaled if weight is None else scaled * weight


def activated(gate_up: TorchTensor, activation: Activation) -> TorchTensor:
    """Return activation(gate) * up of one row."""
    gate, up = gate_up.chunk(2)
    gate = gate.clone()
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return gate * torch.sigmoid(gate) * up


def capped(x: TorchTensor, softcap: float) -> TorchTensor:
    """Return softcap * tanh(x / softcap), or x where the cap is 0."""
    return softcap * torch.tanh(x / softcap) if softcap else x


def rotate(x: TorchTensor, kv: KVPages, position: int) -> TorchTensor:
    """Turn each pair of columns of x (heads, D) by the position's angles."""
    cos, sin = kv.cos[position].clone(), kv.sin[position].clone()
    interleaved, half = kv.attention.rope_interleaved, x.shape[1] // 2
    a, b = (x[:, ::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    a, b = a.contiguous(), b.contiguous()
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=2 if interleaved else 1)
    return turned.flatten(1)


def attend(
    q: TorchTensor, kv: KVPages, pages: Pages, length: int, window: int | None = None
) -> TorchTensor:
    """Attend from one row q (heads * D,) to the first `length` positions of `pages`.

    Where there is a window, the layer's unless another is given, to the last ones of them.
    """
    arch, first = kv.attention, 0
    if seen := arch.window if window is None else window:
        first = max(length - seen, 0)
    index = torch.from_numpy(pages[: -(-length // PAGE_SIZE)].astype(np.int64))
    keys, values = (t[index].flatten(0, 1)[first:length].float() for t in (kv.k, kv.v))
    groups = q.view(arch.num_kv_heads, -1, arch.head_dim)
    out = []
    for head, group in enumerate(groups):
        scores = group.clone() @ keys[:, head].T.contiguous() * arch.scale
        shares = torch.softmax(capped(scores, arch.softcap), dim=1)
        out.append(shares @ values[:, head].contiguous())
    return torch.cat(out).flatten()
