"""The ops of a draft over the target's KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor as TorchTensor

from slipstream.kernels.noise import NoiseKey, gumbel, noise_bits
from slipstream.kernels.ops import F32, Clusters, DraftRows, HeadNorms, Int32
from slipstream.kernels.rowwise.arithmetic import Rounding, attend
from slipstream.kernels.rowwise.ops import Part, SharedOps, rotated_heads
from slipstream.kernels.rowwise.pages import KVPages


class Drafted(Exception):
    """Every token that was asked for is drafted."""


class ReferenceDraftOps(SharedOps):
    """The ops of one draft; `drafted` grows by an int32 array of shape (B,) with every pick."""

    def __init__(self, rows: DraftRows, rounding: Rounding, kept: Sequence[TorchTensor]) -> None:
        super().__init__(rows.token_ids, rounding)
        self._rows = rows
        self._kept = kept
        self.drafted: list[Int32] = []

    def kept(self, index: int) -> TorchTensor:
        """Return the rows of a kept value that chose the anchors."""
        return self._kept[index][torch.from_numpy(self._rows.kept_rows.astype(np.int64))]

    def rope(
        self,
        q: TorchTensor,
        kv: KVPages,
        num_heads: int,
        norms: HeadNorms | None = None,
        *,
        advance: bool = True,
    ) -> TorchTensor:
        """Norm and rotate q by the rows' positions."""
        assert q.shape[1] == num_heads * kv.attention.head_dim, "a query has the layer's head size"
        out = torch.zeros_like(q)
        for r, row in enumerate(q):
            position = int(self._rows.positions[r]) + advance * len(self.drafted)
            out[r] = rotated_heads(row, kv, position, norms)
        return out

    def attention(
        self, q: TorchTensor, kv: KVPages, num_heads: int, window: int | None = None
    ) -> TorchTensor:
        """Return attention over the positions before the anchors."""
        assert q.shape[1] == num_heads * kv.attention.head_dim, "a query has the layer's head size"
        out = torch.zeros_like(q)
        for r, row in enumerate(q):
            length = int(self._rows.positions[r])
            out[r] = attend(row.clone(), kv, self._rows.page_table[r], length, window)
        return out

    def pick(
        self,
        x: TorchTensor,
        weight: list[Part],
        token_ids: Int32,
        clusters: Clusters | None = None,
    ) -> None:
        """Choose the rows' next tokens; raises once all are drafted."""
        logits: F32 = self.linear(x, weight).numpy()
        if clusters is not None:
            centroids: F32 = self.linear(x, clusters.centroids).numpy()
            for row, scores in zip(logits, centroids, strict=True):
                best = np.argsort(-scores, kind="stable")[: clusters.top]
                row[~np.isin(clusters.members, best)] = -np.inf
        picked = [self._pick(r, row, token_ids) for r, row in enumerate(logits)]
        self._token_ids = np.array(picked, np.int32)
        self.drafted.append(self._token_ids)
        if len(self.drafted) == self._rows.k:
            raise Drafted

    def _pick(self, r: int, logits: F32, token_ids: Int32) -> int:
        rows, scores = self._rows, np.where(np.isnan(logits), np.float32(-np.inf), logits)
        if rows.temperatures[r] > 0:
            key = NoiseKey(
                seed=int(rows.seeds[r]),
                choice=int(rows.choices[r]),
                position=int(rows.positions[r]) + len(self.drafted) + 1,
            )
            noise = gumbel(noise_bits(key, int(token_ids.max()) + 1)[token_ids])
            with np.errstate(over="ignore"):
                scores = scores / rows.temperatures[r] + noise
        return int(token_ids[scores.argmax()])
