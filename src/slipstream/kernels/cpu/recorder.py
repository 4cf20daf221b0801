"""Record a forward into a native program, and replay it.

A value is a numbered buffer; the number returns to a free list as soon as the forward drops the
value, so thirty layers share a handful of buffers. Norms and gated activations are not ops of their
own: they become the prologue of the product that consumes them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.kernels.cpu import _native
from slipstream.kernels.cpu.pages import CpuKVLayer
from slipstream.kernels.ops import F32, HeadNorms, Rows, StepResult
from slipstream.models.arch import Activation


@dataclass(eq=False)
class Buffer:
    """A float32 buffer of shape (max_rows, width)."""

    slot: int
    width: int
    own: bool = False  # a copy for each thread where rows are few


@dataclass(eq=False)
class Prologue:
    """A buffer together with what its consumer does to it first."""

    source: Buffer
    kind: str
    width: int
    weight: F32 | None = None
    eps: float = 0.0


Handle = Buffer | Prologue


class SharedRecorder:
    """What targets and drafts record alike."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._free: dict[tuple[int, bool], list[int]] = {}
        self._buffers: list[tuple[str, tuple[Any, ...]]] = []
        self._keep: list[Any] = []  # what the program points into

    def rms_norm(self, x: Buffer, weight: F32, eps: float) -> Prologue:
        """Defer the norm to the product that consumes it."""
        return Prologue(plain(x), "norm", x.width, self._vector(weight, x.width), eps)

    def gated(self, gate_up: Buffer, activation: Activation = "silu") -> Prologue:
        """Defer the activation to the product that consumes it."""
        return Prologue(plain(gate_up), activation, gate_up.width // 2)

    def linear(
        self, x: Handle, weight: Any, residual: Buffer | None = None, bias: F32 | None = None
    ) -> Buffer:
        """Record x @ weight.T (+ bias) (+ residual)."""
        operand = source(x, weight)
        bias = None if bias is None else self._vector(bias, weight.n)
        out = self._buffer(weight.n)
        added = -1 if residual is None else residual.slot
        self._call("linear", *operand, weight, bias, added, out.slot)
        return out

    def norm_add(
        self, residual: Buffer, x: Buffer, weight: F32, eps: float, scale: float = 1.0
    ) -> Buffer:
        """Record (residual + rms_norm(x)) * scale."""
        norm = self._vector(weight, plain(x).width)
        out = self._buffer(x.width)
        self._call("norm_add", x.slot, norm, eps, residual.slot, scale, x.width, out.slot)
        return out

    def _embed(self, table: Any, scale: float, *, own: bool) -> Buffer:
        out = self._buffer(table.k, own=own)
        self._call("embed", table, scale, out.slot)
        return out

    def _rope(
        self,
        q: Buffer,
        kv: CpuKVLayer,
        norms: HeadNorms | None,
        heads: int,
        *,
        own: bool,
        advance: bool = True,
    ) -> Buffer:
        """Record the rotation of q; 0 heads are the layer's own number."""
        d = kv.attention.head_dim
        out = self._of_heads(q, kv, heads or kv.attention.num_heads, own=own)
        weight, eps = (None, 0.0) if norms is None else (self._vector(norms.q, d), norms.eps)
        self._call("rope", q.slot, *kv.place, weight, eps, heads, advance, out.slot)
        return out

    def _of_heads(self, q: Buffer, kv: CpuKVLayer, heads: int, *, own: bool) -> Buffer:
        """Return a buffer for something as wide as q, which has that many of a layer's heads."""
        width = heads * kv.attention.head_dim
        if plain(q).width != width:
            raise ValueError(f"{heads} heads are {width} columns, got {q.width}")
        self._keep.append(kv.cache)
        return self._buffer(width, own=own)

    def _vector(self, vector: F32, width: int) -> F32:
        """Keep a vector alive that the program points into."""
        if vector.shape != (width,):
            raise ValueError(f"a vector of shape ({width},) is needed, got {vector.shape}")
        self._keep.append(vector)
        return vector

    def _call(self, name: str, *arguments: Any) -> None:
        self._calls.append((name, arguments))

    def _buffer(self, width: int, *, own: bool = False) -> Buffer:
        free = self._free.setdefault((width, own), [])
        if not free:
            free.append(len(self._buffers))
            self._buffers.append(("own_buffer" if own else "buffer", (width,)))
        buffer = Buffer(free.pop(), width, own)
        weakref.finalize(buffer, free.append, buffer.slot)
        return buffer

    def _build(self, program: Any) -> Any:
        """Replay everything that was recorded into an empty program."""
        for name, arguments in [*self._buffers, *self._calls]:
            getattr(program, name)(*arguments)
        return program


class Recorder(SharedRecorder):
    """The `Ops` of the CPU back end: every call appends to a program."""

    def __init__(self, isa: str, team: Any, max_rows: int, max_logits: int) -> None:
        super().__init__()
        self._isa, self._team = isa, team
        self._max_rows, self._max_logits = max_rows, max_logits
        self._kept: list[Buffer] = []
        self._vocab = 0

    def embed(self, table: Any, scale: float = 1.0) -> Buffer:
        """Record the embedding of `Rows.token_ids`."""
        return self._embed(table, scale, own=False)

    def rope_append(self, qkv: Buffer, kv: CpuKVLayer, norms: HeadNorms | None = None) -> Buffer:
        """Record norms, rotation and the write of K and V."""
        own = kv.attention
        width = own.q_size + own.kv_size * (1 if own.k_is_v else 2)
        if plain(qkv).width != width:
            raise ValueError(f"q, k and v of this layer are {width} columns, got {qkv.width}")
        if own.v_norm and norms is None:
            raise ValueError("a norm of v takes its epsilon from those of q and k")
        weights: tuple[F32 | None, ...] = (None, None)
        if norms is not None:
            pair = (norms.q, norms.k)
            weights = tuple(None if w is None else self._vector(w, own.head_dim) for w in pair)
        out = self._buffer(own.q_size)
        self._keep.append(kv.cache)
        eps = 0.0 if norms is None else norms.eps
        self._call("rope_append", qkv.slot, *kv.place, *weights, eps, out.slot)
        return out

    def rope(self, q: Buffer, kv: CpuKVLayer, norms: HeadNorms | None = None) -> Buffer:
        """Record norm and rotation of q alone."""
        return self._rope(q, kv, norms, 0, own=False)

    def attention(self, q: Buffer, kv: CpuKVLayer) -> Buffer:
        """Record attention over the pages."""
        out = self._of_heads(q, kv, kv.attention.num_heads, own=False)
        self._call("attention", q.slot, *kv.place, out.slot)
        return out

    def keep(self, x: Buffer) -> None:
        """Never use the buffer of x again."""
        self._kept.append(plain(x))

    def logits(self, x: Handle, weight: Any, softcap: float = 0.0) -> None:
        """Record the output product over `Rows.logit_rows`."""
        self._vocab = weight.n
        self._call("logits", *source(x, weight), weight, softcap)

    def finish(self, share: int) -> CpuStep:
        """Build the program and return the step that replays it."""
        logits = np.empty((self._max_logits, self._vocab), dtype=np.float32)
        argmax = np.empty(self._max_logits, dtype=np.int32)
        program = self._build(
            _native.Program(self._isa, self._team, self._max_rows, logits, argmax)
        )
        kept = [(buffer.slot, buffer.width) for buffer in self._kept]
        return CpuStep(program, logits, argmax, self._max_rows, share, kept, self._keep)


def plain(x: Handle) -> Buffer:
    if isinstance(x, Prologue):
        raise TypeError(f"a {x.kind} may feed only linear or logits on the cpu back end")
    return x


def source(x: Handle, weight: Any) -> tuple[int, str, F32 | None, float]:
    if x.width != weight.k:
        raise ValueError(f"a product of width {weight.k} got a value of width {x.width}")
    if isinstance(x, Prologue):
        return x.source.slot, x.kind, x.weight, x.eps
    return x.slot, "none", None, 0.0


@dataclass
class CpuStep:
    """Replays a recorded forward; results are views that the next call overwrites."""

    program: Any
    logits: F32
    argmax: np.ndarray[Any, np.dtype[np.int32]]
    max_rows: int
    share: int
    kept: list[tuple[int, int]]  # buffer and width
    keep: list[Any] = field(repr=False)
    runs: int = 0

    def __call__(self, rows: Rows) -> StepResult:
        """Run the forward over `rows`."""
        num_rows, wanted = len(rows.token_ids), len(rows.logit_rows)
        if not 1 <= num_rows <= self.max_rows or wanted > len(self.argmax):
            raise ValueError(
                f"a step takes 1 to {self.max_rows} rows and up to {len(self.argmax)} logits, "
                f"got {num_rows} and {wanted}"
            )
        self.runs += 1
        self.program.run(
            rows.token_ids,
            rows.positions,
            rows.sequences,
            rows.page_table,
            rows.logit_rows,
            self.share,
        )
        return StepResult(logits=self.logits[:wanted], argmax=self.argmax[:wanted], run=self.runs)
