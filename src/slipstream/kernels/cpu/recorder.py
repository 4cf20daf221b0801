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
from slipstream.kernels.ops import F32, Rows, StepResult


@dataclass(eq=False)
class _Buffer:
    """A float32 buffer of shape (max_rows, width)."""

    slot: int
    width: int


@dataclass(eq=False)
class _Prologue:
    """A buffer together with what its consumer does to it first."""

    source: _Buffer
    kind: str
    width: int
    weight: F32 | None = None
    eps: float = 0.0


_Handle = _Buffer | _Prologue


class Recorder:
    """The `Ops` of the CPU back end: every call appends to a program."""

    def __init__(self, isa: str, team: Any, max_rows: int, max_logits: int) -> None:
        self._isa, self._team = isa, team
        self._max_rows, self._max_logits = max_rows, max_logits
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._free: dict[int, list[int]] = {}
        self._widths: list[int] = []
        self._keep: list[Any] = []  # arrays whose memory the program points into
        self._vocab = 0

    def embed(self, table: Any) -> _Buffer:
        """Record the embedding of `Rows.token_ids`."""
        out = self._buffer(table.k)
        self._call("embed", table, out.slot)
        return out

    def rms_norm(self, x: _Buffer, weight: F32, eps: float) -> _Prologue:
        """Defer the norm to the product that consumes it."""
        self._keep.append(weight)
        return _Prologue(_plain(x), "norm", x.width, weight, eps)

    def gated(self, gate_up: _Buffer) -> _Prologue:
        """Defer the activation to the product that consumes it."""
        return _Prologue(_plain(gate_up), "gated", gate_up.width // 2)

    def linear(self, x: _Handle, weight: Any, residual: _Buffer | None = None) -> _Buffer:
        """Record x @ weight.T (+ residual)."""
        source = _source(x, weight)
        out = self._buffer(weight.n)
        self._call("linear", *source, weight, -1 if residual is None else residual.slot, out.slot)
        return out

    def rope_append(self, qkv: _Buffer, kv: Any) -> _Buffer:
        """Record rotation and the write of K and V."""
        cache, layer = kv
        out = self._buffer(cache.width)
        self._keep.append(cache)
        self._call("rope_append", _plain(qkv).slot, cache.native, layer, out.slot)
        return out

    def attention(self, q: _Buffer, kv: Any) -> _Buffer:
        """Record attention over the pages."""
        cache, layer = kv
        out = self._buffer(cache.width)
        self._call("attention", _plain(q).slot, cache.native, layer, out.slot)
        return out

    def logits(self, x: _Handle, weight: Any) -> None:
        """Record the output product over `Rows.logit_rows`."""
        self._vocab = weight.n
        self._call("logits", *_source(x, weight), weight)

    def finish(self, share: int) -> CpuStep:
        """Build the program and return the step that replays it."""
        logits = np.empty((self._max_logits, self._vocab), dtype=np.float32)
        argmax = np.empty(self._max_logits, dtype=np.int32)
        program = _native.Program(self._isa, self._team, self._max_rows, logits, argmax)
        for width in self._widths:
            program.buffer(width)
        for name, arguments in self._calls:
            getattr(program, name)(*arguments)
        return CpuStep(program, logits, argmax, self._max_rows, share, self._keep)

    def _call(self, name: str, *arguments: Any) -> None:
        self._calls.append((name, arguments))

    def _buffer(self, width: int) -> _Buffer:
        free = self._free.setdefault(width, [])
        if not free:
            free.append(len(self._widths))
            self._widths.append(width)
        buffer = _Buffer(free.pop(), width)
        weakref.finalize(buffer, free.append, buffer.slot)
        return buffer


def _plain(x: _Handle) -> _Buffer:
    if isinstance(x, _Prologue):
        raise TypeError(f"a {x.kind} may feed only linear or logits on the cpu back end")
    return x


def _source(x: _Handle, weight: Any) -> tuple[int, str, F32 | None, float]:
    if x.width != weight.k:
        raise ValueError(f"a product of width {weight.k} got a value of width {x.width}")
    if isinstance(x, _Prologue):
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
    keep: list[Any] = field(repr=False)

    def __call__(self, rows: Rows) -> StepResult:
        """Run the forward over `rows`."""
        num_rows, wanted = len(rows.token_ids), len(rows.logit_rows)
        if not 1 <= num_rows <= self.max_rows or wanted > len(self.argmax):
            raise ValueError(
                f"a step takes 1 to {self.max_rows} rows and up to {len(self.argmax)} logits, "
                f"got {num_rows} and {wanted}"
            )
        self.program.run(
            rows.token_ids,
            rows.positions,
            rows.sequences,
            rows.page_table,
            rows.logit_rows,
            self.share,
        )
        return StepResult(logits=self.logits[:wanted], argmax=self.argmax[:wanted])
