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
from slipstream.kernels.ops import F32, HeadNorms, Rows, StepResult
from slipstream.models.arch import (
    EMBEDDING_SCALE,
    GELU,
    LOGIT_SOFTCAP,
    POST_NORMS,
    QK_NORM,
    QKV_BIAS,
    SHARED_KV,
    SLOWER,
    Activation,
    unsupported,
)

WHO = "the cpu back end"


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
        self._keep.append(weight)
        return Prologue(plain(x), "norm", x.width, weight, eps)

    def gated(self, gate_up: Buffer, activation: Activation = "silu") -> Prologue:
        """Defer the activation to the product that consumes it."""
        refuse_unless(activation == "silu", GELU)
        return Prologue(plain(gate_up), "gated", gate_up.width // 2)

    def linear(
        self, x: Handle, weight: Any, residual: Buffer | None = None, bias: F32 | None = None
    ) -> Buffer:
        """Record x @ weight.T (+ residual)."""
        refuse_unless(bias is None, QKV_BIAS)
        operand = source(x, weight)
        out = self._buffer(weight.n)
        self._call("linear", *operand, weight, -1 if residual is None else residual.slot, out.slot)
        return out

    def norm_add(
        self, residual: Buffer, x: Buffer, weight: F32, eps: float, scale: float = 1.0
    ) -> Buffer:
        """Refuse."""
        raise unsupported("the model", [POST_NORMS], WHO, SLOWER)

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
        refuse_unless(scale == 1, EMBEDDING_SCALE)
        out = self._buffer(table.k)
        self._call("embed", table, out.slot)
        return out

    def rope_append(self, qkv: Buffer, kv: Any, norms: HeadNorms | None = None) -> Buffer:
        """Record rotation and the write of K and V."""
        refuse_unless(norms is None, QK_NORM)
        cache, layer = kv
        out = self._buffer(cache.width)
        self._keep.append(cache)
        self._call("rope_append", plain(qkv).slot, cache.native, layer, out.slot)
        return out

    def rope(self, q: Buffer, kv: Any, norms: HeadNorms | None = None) -> Buffer:
        """Refuse."""
        raise unsupported("the model", [SHARED_KV], WHO, SLOWER)

    def attention(self, q: Buffer, kv: Any) -> Buffer:
        """Record attention over the pages."""
        cache, layer = kv
        out = self._buffer(cache.width)
        self._call("attention", plain(q).slot, cache.native, layer, out.slot)
        return out

    def keep(self, x: Buffer) -> None:
        """Never use the buffer of x again."""
        self._kept.append(plain(x))

    def logits(self, x: Handle, weight: Any, softcap: float = 0.0) -> None:
        """Record the output product over `Rows.logit_rows`."""
        refuse_unless(softcap == 0, LOGIT_SOFTCAP)
        self._vocab = weight.n
        self._call("logits", *source(x, weight), weight)

    def finish(self, share: int) -> CpuStep:
        """Build the program and return the step that replays it."""
        logits = np.empty((self._max_logits, self._vocab), dtype=np.float32)
        argmax = np.empty(self._max_logits, dtype=np.int32)
        program = self._build(
            _native.Program(self._isa, self._team, self._max_rows, logits, argmax)
        )
        kept = [(buffer.slot, buffer.width) for buffer in self._kept]
        return CpuStep(program, logits, argmax, self._max_rows, share, kept, self._keep)


def refuse_unless(neutral: bool, *features: str) -> None:
    """Refuse an op's argument that is not the neutral one.

    Raises:
        LoadError: it names the features.
    """
    if not neutral:
        raise unsupported("the model", features, WHO, SLOWER)


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
