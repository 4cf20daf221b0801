"""Record a forward as a list of kernel launches, which a step replays or captures.

Every kernel starts while the one before still runs and waits for it before its first read or
write (programmatic dependent launch), so launch latency hides behind work.
"""

from __future__ import annotations

import math

import torch

from slipstream.kernels.cuda.attention import AttentionRecorder, page_stride
from slipstream.kernels.cuda.graphs import CudaStep
from slipstream.kernels.cuda.inputs import Inputs
from slipstream.kernels.cuda.kernels import StepKernels
from slipstream.kernels.cuda.launches import THREADS, Buffer, Normed
from slipstream.kernels.cuda.linear import CudaWeight, embed
from slipstream.kernels.cuda.pages import KVLayer
from slipstream.kernels.cuda.products import Products
from slipstream.kernels.ops import HeadNorms

ARGMAX_BLOCKS = 64  # of a row: 262,144 logits are then sixteen a thread


class Recorder(AttentionRecorder):
    """The `Ops` of the CUDA back end: every call adds launches."""

    def __init__(
        self, kernels: StepKernels, inputs: Inputs, products: Products, max_logits: int
    ) -> None:
        super().__init__(kernels, inputs, products)
        self._max_logits = max_logits
        self._logits: torch.Tensor | None = None
        self._argmax: torch.Tensor | None = None
        self._kept: list[Buffer] = []

    def embed(self, table: CudaWeight, scale: float = 1.0) -> Buffer:
        """Record the embedding of `Rows.token_ids`, scaled."""
        out = self._buffer(torch.float32, table.k)
        inputs, to = self._inputs, out.tensor
        self._add(lambda rows, _: embed(inputs.token_ids, table, to, num_rows=rows, scale=scale))
        return out

    def rope_append(self, qkv: Buffer, kv: KVLayer, norms: HeadNorms | None = None) -> Buffer:
        """Record norms and rotation, and the write of K and V."""
        arch, inputs = kv.attention, self._inputs
        if norms is not None or arch.v_norm or arch.k_is_v:
            return self._norm_rope(qkv, kv, norms, arch.num_heads, arch.num_kv_heads)
        out = self._buffer(torch.float16, arch.num_heads * kv.padded_dim)
        heads = arch.num_heads + 2 * arch.num_kv_heads
        blocks = math.ceil(heads * kv.padded_dim // 2 / THREADS)
        kernel, source, q = self._kernels.rope_append, qkv.tensor, out.tensor
        overlap = self._kernels.overlap
        tail = (
            *(arch.num_heads, arch.num_kv_heads, arch.head_dim, kv.padded_dim),
            int(arch.rope_interleaved),
        )

        def launch(rows: int, _: int) -> None:
            arguments = (
                *(source, q, kv.pages, page_stride(kv), kv.cos, kv.sin),
                *(inputs.header, inputs.positions, inputs.sequences, inputs.page_table, *tail),
            )
            kernel.launch((blocks, rows, 1), (THREADS, 1, 1), arguments, overlap=overlap)

        self._add(launch)
        return out

    def rope(self, q: Buffer, kv: KVLayer, norms: HeadNorms | None = None) -> Buffer:
        """Record norms and rotation of q."""
        return self._norm_rope(q, kv, norms, kv.attention.num_heads, 0)

    def attention(self, q: Buffer, kv: KVLayer) -> Buffer:
        """Record attention over the pages."""
        return self._attend(q, kv, kv.attention.num_heads)

    def keep(self, x: Buffer) -> None:
        """Never use the buffer of x again."""
        self._kept.append(x)

    def logits(self, x: Buffer | Normed, weight: CudaWeight, softcap: float = 0.0) -> None:
        """Record the output product over `Rows.logit_rows`, and its argmax."""
        size = (self._max_logits, weight.n)
        logits = self._tensor(size, torch.float32)
        argmax = torch.zeros(self._max_logits, dtype=torch.int32).pin_memory()
        found = self._tensor((self._max_logits, ARGMAX_BLOCKS), torch.int64)
        arrivals = self._tensor((self._max_logits,), torch.int32)
        self._logits, self._argmax = logits, argmax
        source = self._operand(x, weight, picks_rows=True)
        self._product(source.tensor, weight, logits, None, lambda _, wanted: wanted)
        kernel, vocab = self._kernels.argmax, weight.n
        overlap, cap = self._kernels.overlap, self._kernels.cap_logits

        def launch(_: int, wanted: int) -> None:
            if wanted and softcap:
                grid = (ARGMAX_BLOCKS, wanted, 1)
                cap.launch(grid, (THREADS, 1, 1), (logits, vocab, softcap), overlap=overlap)
            if wanted:
                arguments = (logits, argmax, found, arrivals, vocab)
                kernel.launch(
                    (ARGMAX_BLOCKS, wanted, 1), (THREADS, 1, 1), arguments, overlap=overlap
                )

        self._add(launch)

    def finish(self) -> CudaStep:
        """Return the step that replays what was recorded."""
        assert self._logits is not None, "a forward ends in logits"
        assert self._argmax is not None
        return CudaStep(
            self._launches,
            self._inputs,
            self._logits,
            self._argmax,
            max_rows=self._max_rows,
            max_logits=self._max_logits,
            workspace_bytes=self._workspace_bytes + self._inputs.num_bytes,
            cache=self._kernels.cache,
            switches_after=self._products.switches_after,
            kept=[buffer.tensor for buffer in self._kept],
        )
