"""Record a forward as a list of kernel launches, which a step replays or captures.

A value is a device buffer of `max_rows` rows; the buffer returns to a free list as soon as the
forward drops the value, so the layers share a handful of buffers. Products take bfloat16: a norm is
launched by the product that consumes it, which knows the rows it wants.

Every kernel starts while the one before still runs and waits for it before its first read or
write (programmatic dependent launch), so launch latency hides behind work.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.cuda.graphs import CudaStep, Launch
from slipstream.kernels.cuda.inputs import Inputs
from slipstream.kernels.cuda.kernels import (
    RECORD_EXTRA,
    SPLIT,
    SPREAD_ROWS,
    AttentionKernel,
    StepKernels,
    Vector,
)
from slipstream.kernels.cuda.linear import CudaWeight, embed, linear
from slipstream.kernels.cuda.pages import WHO, KVLayer
from slipstream.kernels.ops import HeadNorms
from slipstream.models.arch import SLOWER, Activation, AttentionArch, unsupported

THREADS = 256
NORM_WARPS = 4  # heads of a block
PLAN_THREADS = 256
ARGMAX_BLOCKS = 64  # of a row: 262,144 logits are then sixteen a thread
# A verify: one round of sixteen rows or a few of several sequences. More rows are mostly prompt,
# which shares weight reads whatever kernel verifies are asked to run on.
VERIFY_ROWS = 32


@dataclass(eq=False)
class Buffer:
    """A device tensor of shape (max_rows, width)."""

    tensor: torch.Tensor
    width: int


@dataclass(eq=False)
class Normed:
    """A buffer and the norm that its consumer launches."""

    source: Buffer
    weight: Vector
    eps: float

    @property
    def width(self) -> int:
        """Columns."""
        return self.source.width


@dataclass(frozen=True, kw_only=True)
class Products:
    """How rows share weight reads: `kernel` and `tile_m` as in EngineConfig."""

    kernel: str
    tile_m: int

    def kernel_of(self, num_rows: int) -> str:
        """Return the kernel that serves a forward."""
        return self.kernel if num_rows <= VERIFY_ROWS or self.kernel == "tile" else "auto"

    @property
    def switches_after(self) -> int:
        """Rows up to which `kernel` serves, 0 if it serves all."""
        return VERIFY_ROWS if self.kernel in ("gemv", "multirow") else 0


class Recorder:
    """The `Ops` of the CUDA back end: every call adds launches."""

    def __init__(
        self, kernels: StepKernels, inputs: Inputs, products: Products, max_logits: int
    ) -> None:
        self._kernels, self._inputs, self._products = kernels, inputs, products
        self._max_rows, self._max_logits = inputs.max_rows, max_logits
        self._launches: list[Launch] = []
        self._logits: torch.Tensor | None = None
        self._argmax: torch.Tensor | None = None
        self._workspace_bytes = 0
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._attention: dict[tuple[int, AttentionArch], _Attention] = {}
        self._kept: list[Buffer] = []

    def embed(self, table: CudaWeight, scale: float = 1.0) -> Buffer:
        """Record the embedding of `Rows.token_ids`, scaled."""
        out = self._buffer(torch.float32, table.k)
        inputs, to = self._inputs, out.tensor
        self._add(lambda rows, _: embed(inputs.token_ids, table, to, num_rows=rows, scale=scale))
        return out

    def rms_norm(self, x: Buffer, weight: Vector, eps: float) -> Normed:
        """Defer the norm to the product that consumes it."""
        return Normed(x, weight, eps)

    def linear(
        self,
        x: Buffer | Normed,
        weight: CudaWeight,
        residual: Buffer | None = None,
        bias: Vector | None = None,
    ) -> Buffer:
        """Record x @ weight.T, and what is added to it."""
        if residual is not None and bias is not None:
            raise unsupported("the model", ["a bias beside a residual"], WHO, SLOWER)
        source = self._operand(x, weight)
        out = self._buffer(torch.float32, weight.n)
        before = None if residual is None else residual.tensor
        if bias is not None:
            before = bias.view(1, -1)
        self._product(source.tensor, weight, out.tensor, before, lambda rows, _: rows)
        return out

    def norm_add(
        self, residual: Buffer, x: Buffer, weight: Vector, eps: float, scale: float = 1.0
    ) -> Buffer:
        """Record (residual + the norm of x) * scale."""
        out = self._buffer(torch.float32, x.width)
        kernel, overlap = self._kernels.norm_add, self._kernels.overlap
        threads = min(1024, math.ceil(x.width / 4 / 32) * 32)
        arguments = (residual.tensor, x.tensor, weight, out.tensor, x.width, eps, scale)
        self._add(
            lambda rows, _: kernel.launch((rows, 1, 1), (threads, 1, 1), arguments, overlap=overlap)
        )
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
                *(source, q, kv.pages, _stride(kv), kv.cos, kv.sin),
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

    def gated(self, gate_up: Buffer, activation: Activation = "silu") -> Buffer:
        """Record the activation."""
        width = gate_up.width // 2
        if width % 4:
            raise ValueError(f"an activation's width must be a multiple of 4, got {width}")
        out = self._buffer(torch.bfloat16, width)
        blocks = math.ceil(width / 4 / THREADS)
        kernel, overlap = self._kernels.gated, self._kernels.overlap
        arguments = (gate_up.tensor, out.tensor, width, int(activation == "gelu_tanh"))
        self._add(
            lambda rows, _: kernel.launch(
                (blocks, rows, 1), (THREADS, 1, 1), arguments, overlap=overlap
            )
        )
        return out

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
        head = (source.tensor, out.tensor, kv.pages, _stride(kv), kv.cos, kv.sin)
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

    def _product(
        self,
        x: torch.Tensor,
        weight: CudaWeight,
        out: torch.Tensor,
        residual: torch.Tensor | None,
        count: Callable[[int, int], int],
    ) -> None:
        products = self._products

        def launch(rows: int, wanted: int) -> None:
            num_rows = count(rows, wanted)
            if num_rows:
                linear(
                    x,
                    weight,
                    out,
                    residual,
                    num_rows=num_rows,
                    kernel=products.kernel_of(num_rows),
                    tile_m=products.tile_m,
                )

        self._add(launch)

    def _operand(
        self, x: Buffer | Normed, weight: CudaWeight, *, picks_rows: bool = False
    ) -> Buffer:
        """Return x as bfloat16, launching its norm; `picks_rows` takes the rows of logits only."""
        if x.width != weight.k:
            raise ValueError(f"a product of width {weight.k} got a value of width {x.width}")
        if x.width % 4:
            raise ValueError(f"a product's width must be a multiple of 4, got {x.width}")
        if isinstance(x, Buffer) and x.tensor.dtype == torch.bfloat16 and not picks_rows:
            return x
        out = self._buffer(torch.bfloat16, x.width)
        first: tuple[Any, ...]
        last: tuple[Any, ...] = (x.width,)
        if isinstance(x, Normed):
            kernel = self._kernels.rms_norm
            first, last = (x.source.tensor, x.weight, out.tensor), (x.width, x.eps)
        elif x.tensor.dtype == torch.bfloat16:
            kernel, first = self._kernels.pick_rows, (x.tensor, out.tensor)
        else:
            kernel, first = self._kernels.round_rows, (x.tensor, out.tensor)
        threads = min(1024, math.ceil(x.width / 4 / 32) * 32)
        inputs, overlap = self._inputs, self._kernels.overlap

        def launch(rows: int, wanted: int) -> None:
            count = wanted if picks_rows else rows
            if count:
                arguments = (*first, inputs.logit_rows if picks_rows else None, *last)
                kernel.launch((count, 1, 1), (threads, 1, 1), arguments, overlap=overlap)

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

    def _add(self, launch: Launch) -> None:
        self._launches.append(launch)

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(shape, dtype=dtype, device="cuda")
        self._workspace_bytes += tensor.nbytes
        return tensor

    def _buffer(self, dtype: torch.dtype, width: int) -> Buffer:
        free = self._free.setdefault((dtype, width), [])
        tensor = free.pop() if free else self._tensor((self._max_rows, width), dtype)
        buffer = Buffer(tensor, width)
        weakref.finalize(buffer, free.append, tensor)
        return buffer


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
                *(q, kv.pages, _stride(kv), inputs.header, inputs.positions),
                *(inputs.page_table, self.plan, out, self.parts, self.arrivals),
                *(2 if in_turn else self.slots, int(in_turn), *heads, *seen),
            )
            grid = (self.kernel.num_blocks, 1, 1)
            self.kernel.main.launch(
                grid, (self.kernel.threads, 1, 1), arguments, overlap=self.overlap
            )

        return launch


def _stride(kv: KVLayer) -> ctypes.c_longlong:
    """Return the fp16 elements between pages."""
    return ctypes.c_longlong(kv.pages.stride(0))
