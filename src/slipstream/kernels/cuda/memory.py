"""How much memory of the GPU there is, and what a step takes of it before it is compiled."""

from __future__ import annotations

import math

import torch

from slipstream.kernels.cuda.inputs import TABLE_ENTRIES
from slipstream.kernels.cuda.kernels import RECORD_EXTRA, SPLIT, SPREAD_ROWS
from slipstream.kernels.cuda.pages import padded_head_dim, page_bytes
from slipstream.models.arch import Arch

# Graphs of all buckets, and what the driver and torch keep: seen with a decoder of 48 layers.
OVERHEAD_BYTES = 1 << 30


class CudaMemory:
    """The current device's memory."""

    def limit_bytes(self, fraction: float) -> int:
        """Return the bytes that this process may have, never more than others leave."""
        free, total = torch.cuda.mem_get_info()
        return min(int(fraction * total), free + torch.cuda.memory_reserved())

    def page_bytes(self, arch: Arch) -> int:
        """Return the bytes of one KV page, all layers together."""
        return page_bytes(arch)

    def workspace_bytes(self, arch: Arch, *, max_rows: int, max_logits: int, max_len: int) -> int:
        """Return what a step takes besides weights and pages: activations, logits, graphs."""
        limits = {"max_rows": max_rows, "max_logits": max_logits, "max_len": max_len}
        return _buffer_bytes(arch, **limits) + OVERHEAD_BYTES

    def draft_bytes(self, arch: Arch, *, max_rows: int, max_len: int) -> int:
        """Return what an assistant's draft takes besides weights: no more than its target would."""
        return _buffer_bytes(arch, max_rows=max_rows, max_logits=max_rows, max_len=max_len)


def _buffer_bytes(arch: Arch, *, max_rows: int, max_logits: int, max_len: int) -> int:
    kinds = set(arch.attention)
    heads = max(kind.num_heads for kind in kinds)
    # Queries as a product makes them, rotated and padded, and what attention returns.
    queries = max(kind.q_size for kind in kinds)
    padded = max(kind.num_heads * padded_head_dim(kind.head_dim) for kind in kinds)
    fused = max(kind.q_size + 2 * kind.kv_size for kind in kinds)
    streams = 4 * 3 * arch.hidden_size  # the residual before and after, and what is in between
    products = 4 * (fused + 2 * arch.ffn_size)
    operands = 2 * (2 * arch.hidden_size + padded + queries + arch.ffn_size)
    logits = max_logits * (4 * arch.vocab_size + 1024)
    slots = max(2, math.ceil(max_len / SPLIT))
    records = max(min(SPREAD_ROWS, max_rows) * slots, 2 * max_rows)
    parts = sum(
        4 * records * kind.num_heads * (padded_head_dim(kind.head_dim) + RECORD_EXTRA)
        for kind in kinds
    )
    rotations = {(kind.frequencies, kind.rope_magnitude): kind.head_dim for kind in kinds}
    tables = 4 * (TABLE_ENTRIES + sum(rotations.values()) * max_len)  # pages, cosines, sines
    rows = max_rows * (streams + products + operands + 4 * heads + 64)
    return rows + logits + parts + tables
