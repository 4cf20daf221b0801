"""Record attention over the pages, and the norms and rotation of heads before it.

Layers of one kind share a plan of the step's tiles and room for the sums of splits.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from slipstream.kernels.cuda.graphs import Launch
from slipstream.kernels.cuda.inputs import Inputs
from slipstream.kernels.cuda.kernels import (
    RECORD_EXTRA,
    SPLIT,
    SPREAD_ROWS,
    AttentionKernel,
    StepKernels,
)
from slipstream.kernels.cuda.launches import Buffer
from slipstream.kernels.cuda.pages import KVLayer
from slipstream.kernels.cuda.products import ProductRecorder, Products
from slipstream.kernels.ops import HeadNorms
from slipstream.models.arch import AttentionArch

NORM_WARPS = 4  # heads of a block
PLAN_THREADS = 256


class AttentionRecorder(ProductRecorder):
    """What targets and drafts share of attention."""

    def __init__(self, kernels: StepKernels, inputs: Inputs, products: Products) -> None:
        super().__init__(kernels, inputs, products)
        self._attention: dict[tuple[int, AttentionArch], _Attention] = {}

    def _attend(self, q: Buffer, kv: KVLayer, num_heads: int) -> Buffer:
        out = self._buffer(torch.bfloat16, num_heads * kv.attention.head_dim)
        shared = self._attention_of(kv, num_heads)
        self._add(shared.launch_of(q.tensor, kv, out.tensor, self._inputs))
        return out

    def _norm_rope(
        self,
        source: Buffer,
        kv: KVLayer,
        norms: HeadNorms | None,
        num_heads: int,
        num_kv_heads: int,
        shift: int = 0,
    ) -> Buffer:
        """Record norms and rotation by the positions plus `shift`; no KV heads for q alone."""
        arch, inputs = kv.attention, self._inputs
        heads = num_heads + (1 if arch.k_is_v else 2) * num_kv_heads
        if source.width != heads * arch.head_dim:
            raise ValueError(f"{heads} heads of {arch.head_dim} columns, got {source.width}")
        out = self._buffer(torch.float16, num_heads * kv.padded_dim)
        blocks = math.ceil((num_heads + 2 * num_kv_heads) / NORM_WARPS)
        kernel, overlap = self._kernels.norm_rope, self._kernels.overlap
        head = (source.tensor, out.tensor, kv.pages, page_stride(kv), kv.cos, kv.sin)
        weights = (None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
        sizes = (shift, num_heads, num_kv_heads, arch.head_dim, kv.padded_dim)
        flags = (int(arch.rope_interleaved), int(arch.v_norm), int(arch.k_is_v))

        def launch(rows: int, _: int) -> None:
            arguments = (
                *(*head, inputs.header, inputs.positions, inputs.sequences, inputs.page_table),
                *(*weights, *sizes, *flags),
            )
            kernel.launch((blocks, rows, 1), (32 * NORM_WARPS, 1, 1), arguments, overlap=overlap)

        self._add(launch)
        return out

    def _attention_of(self, kv: KVLayer, num_heads: int) -> _Attention:
        """Return what layers of one kind share; the first one plans the step's tiles."""
        key = (num_heads, kv.attention)
        if key not in self._attention:
            shared = _Attention.of(kv, num_heads, self._kernels, self._max_rows)
            self._workspace_bytes += shared.num_bytes
            self._attention[key] = shared
            self._launches.insert(0, shared.plan_of(self._inputs))
        return self._attention[key]


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """What the attention launches of layers of one kind share.

    Attributes:
        num_heads: query heads.
        plan: the tiles of a step, see plan_tiles.
        parts: sums of splits; `slots` for each row and head up to SPREAD_ROWS rows, else two.
        arrivals: workers that are done, by tile and head block.
    """

    kernel: AttentionKernel
    num_heads: int
    plan: torch.Tensor
    parts: torch.Tensor
    arrivals: torch.Tensor
    slots: int
    tile_rows: int
    overlap: bool

    @classmethod
    def of(cls, kv: KVLayer, num_heads: int, kernels: StepKernels, max_rows: int) -> _Attention:
        group = num_heads // kv.attention.num_kv_heads
        tile_rows = 16 // min(group, 16)
        slots = max(2, math.ceil(kv.max_len / SPLIT))
        record = kv.padded_dim + RECORD_EXTRA
        most = max(min(SPREAD_ROWS, max_rows) * slots, 2 * max_rows)
        return cls(
            kernel=kernels.attention(kv.attention),
            num_heads=num_heads,
            plan=torch.zeros(4 + 4 * max_rows, dtype=torch.int32, device="cuda"),
            parts=torch.zeros(most * num_heads * record, device="cuda"),
            arrivals=torch.zeros(max_rows * num_heads, dtype=torch.int32, device="cuda"),
            slots=slots,
            tile_rows=tile_rows,
            overlap=kernels.overlap,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(t.nbytes for t in (self.plan, self.parts, self.arrivals))

    def plan_of(self, inputs: Inputs) -> Launch:
        """Return the launch that groups a step's rows into tiles."""
        return lambda rows, _: self.kernel.plan.launch(
            (1, 1, 1),
            (PLAN_THREADS, 1, 1),
            (inputs.positions, inputs.sequences, self.plan, rows, self.tile_rows),
            overlap=self.overlap,
        )

    def launch_of(self, q: torch.Tensor, kv: KVLayer, out: torch.Tensor, inputs: Inputs) -> Launch:
        """Return the launch of one layer."""
        arch = kv.attention
        scale, cap = math.log2(math.e) * arch.scale, 0.0
        if arch.softcap:
            scale, cap = arch.scale / arch.softcap, math.log2(math.e) * arch.softcap
        heads = (self.num_heads, arch.num_kv_heads, arch.head_dim)
        seen = (scale, cap, arch.window)

        def launch(rows: int, _: int) -> None:
            in_turn = rows > SPREAD_ROWS
            arguments = (
                *(q, kv.pages, page_stride(kv), inputs.header, inputs.positions),
                *(inputs.page_table, self.plan, out, self.parts, self.arrivals),
                *(2 if in_turn else self.slots, int(in_turn), *heads, *seen),
            )
            grid = (self.kernel.num_blocks, 1, 1)
            self.kernel.main.launch(
                grid, (self.kernel.threads, 1, 1), arguments, overlap=self.overlap
            )

        return launch


def page_stride(kv: KVLayer) -> ctypes.c_longlong:
    """Return the fp16 elements between pages."""
    return ctypes.c_longlong(kv.pages.stride(0))
