"""The ops of a target's step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor as TorchTensor

from slipstream.kernels.ops import PAGE_SIZE, HeadNorms, Int32, Rows
from slipstream.kernels.rowwise.arithmetic import (
    Rounding,
    activated,
    attend,
    by_row,
    capped,
    normed,
    normed_heads,
    rotate,
)
from slipstream.kernels.rowwise.pages import KVPages
from slipstream.models.arch import Activation


@dataclass(frozen=True, kw_only=True)
class Part:
    """One matrix of a fused weight: float32 of shape (N, K)."""

    values: TorchTensor
    quantized: bool


class SharedOps:
    """The ops of any forward over rows of `token_ids`."""

    def __init__(self, token_ids: Int32, rounding: Rounding) -> None:
        self._token_ids = token_ids
        self._round = rounding

    def embed(self, table: list[Part], scale: float = 1.0) -> TorchTensor:
        """Return scale * the embedding rows of the token ids."""
        (part,) = table
        return part.values[torch.from_numpy(self._token_ids.astype(np.int64))] * scale

    def rms_norm(self, x: TorchTensor, weight: TorchTensor, eps: float) -> TorchTensor:
        """Return x / sqrt(mean(x**2) + eps) * weight."""
        return by_row(lambda row: normed(row, weight, eps), x)

    def linear(
        self,
        x: TorchTensor,
        weight: list[Part],
        residual: TorchTensor | None = None,
        bias: TorchTensor | None = None,
    ) -> TorchTensor:
        """Return x @ weight.T + bias + residual."""
        product = by_row(lambda row: self._project(row, weight), x)
        for added in (bias, residual):
            product = product if added is None else product + added
        return product

    def norm_add(
        self,
        residual: TorchTensor,
        x: TorchTensor,
        weight: TorchTensor,
        eps: float,
        scale: float = 1.0,
    ) -> TorchTensor:
        """Return (residual + rms_norm(x, weight, eps)) * scale."""
        return (residual + self.rms_norm(x, weight, eps)) * scale

    def gated(self, gate_up: TorchTensor, activation: Activation = "silu") -> TorchTensor:
        """Return activation(gate) * up."""
        return by_row(lambda row: activated(row, activation), gate_up)

    def _project(self, row: TorchTensor, weight: list[Part]) -> TorchTensor:
        """Multiply one row by every part, rounding it first where a fast kernel would."""
        return torch.cat([part.values.mv(self._round(row, part.quantized)) for part in weight])


class ReferenceOps(SharedOps):
    """The ops of one target step over `rows`."""

    def __init__(self, rows: Rows, rounding: Rounding) -> None:
        super().__init__(rows.token_ids, rounding)
        self._rows = rows
        self.kept: list[TorchTensor] = []

    def rope_append(
        self, qkv: TorchTensor, kv: KVPages, norms: HeadNorms | None = None
    ) -> TorchTensor:
        """Rotate q and k, write k and v to the pages, return q; padding rows write nothing."""
        arch = kv.attention
        sizes = [arch.q_size] + [arch.kv_size] * (1 if arch.k_is_v else 2)
        q = self.rope(qkv[:, : arch.q_size], kv, norms)
        for r, row in enumerate(qkv):
            position = int(self._rows.positions[r])
            if position < 0:
                continue
            _, *parts = (part.view(-1, arch.head_dim) for part in row.clone().split(sizes))
            k, v = parts[0], parts[-1]
            if norms is not None and norms.k is not None:
                k = normed_heads(k, norms.k, norms.eps)
            if arch.v_norm:
                assert norms is not None, "a norm of v takes its epsilon from those of q and k"
                v = normed_heads(v, None, norms.eps)
            page = int(self._rows.page_table[self._rows.sequences[r], position // PAGE_SIZE])
            kv.k[page, position % PAGE_SIZE] = rotate(k, kv, position)
            kv.v[page, position % PAGE_SIZE] = v
        return q

    def rope(self, q: TorchTensor, kv: KVPages, norms: HeadNorms | None = None) -> TorchTensor:
        """Norm and rotate q; zeros for padding rows."""
        out = torch.zeros(q.shape)
        for r, row in enumerate(q):
            position = int(self._rows.positions[r])
            if position >= 0:
                out[r] = rotated_heads(row, kv, position, norms)
        return out

    def attention(self, q: TorchTensor, kv: KVPages) -> TorchTensor:
        """Return causal attention over the pages; zeros for padding rows."""
        out = torch.zeros_like(q)
        for r, row in enumerate(q):
            length = int(self._rows.positions[r]) + 1
            if length > 0:
                table = self._rows.page_table[self._rows.sequences[r]]
                out[r] = attend(row.clone(), kv, table, length)
        return out

    def keep(self, x: TorchTensor) -> None:
        """Keep x."""
        self.kept.append(x)

    def logits(self, x: TorchTensor, weight: list[Part], softcap: float = 0.0) -> TorchTensor:
        """Return the logits of the wanted rows."""
        wanted = self._rows.logit_rows
        if not len(wanted):
            return torch.zeros(0, sum(len(part.values) for part in weight))
        rows = self.linear(x[torch.from_numpy(wanted.astype(np.int64))], weight)
        return by_row(lambda row: capped(row, softcap), rows)


def rotated_heads(
    row: TorchTensor, kv: KVPages, position: int, norms: HeadNorms | None
) -> TorchTensor:
    """Norm and rotate the heads of one row of q, and join them again."""
    heads = row.clone().view(-1, kv.attention.head_dim)
    if norms is not None:
        heads = normed_heads(heads, norms.q, norms.eps)
    return rotate(heads, kv, position).flatten()
