"""The reference back end: every op in plain torch, the definition of correct.

Fast back ends are tested against it; it serves when no compiled one is there. Torch's own kernels
are not row invariant (a matrix product may take another path at 3 rows than at 1), so nothing here
ever sees two rows: each op takes its rows one by one, each row a fresh copy, so that shape and
alignment are the same whatever rides along. A step runs on one thread, so the reduction order does
not depend on the machine's setting. Attention reads K and V back from the pages, rounded to
the cache's dtype, this step's own rows included.

Not here: speed. A weight is held as float32 and read once per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor as TorchTensor

from slipstream.kernels.noise import NoiseKey, gumbel, noise_bits
from slipstream.kernels.ops import (
    F32,
    PAGE_SIZE,
    DraftOps,
    DraftRows,
    Int32,
    Ops,
    Rows,
    Step,
    StepResult,
)
from slipstream.kernels.rope import rope_tables
from slipstream.models.arch import Arch
from slipstream.models.weights import QuantizedTensor, Tensor

ACTIVATION_GROUP = 32  # columns that share one int8 scale, as the fast CPU kernels have it
# What a product does to an input row, told whether its weights are quantized.
Rounding = Callable[[TorchTensor, bool], TorchTensor]
_KV_DTYPES = {"f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One matrix of a fused weight: float32 of shape (N, K)."""

    values: TorchTensor
    quantized: bool


@dataclass(frozen=True, kw_only=True)
class KVPages:
    """One layer's pages, (num_pages, 16, kv_heads, D), and what rope and attention need besides."""

    arch: Arch
    k: TorchTensor
    v: TorchTensor
    cos: TorchTensor
    sin: TorchTensor


class ReferenceKVCache:
    """KV pages of every layer as torch tensors."""

    def __init__(self, arch: Arch, num_pages: int, max_len: int, dtype: torch.dtype) -> None:
        self.num_pages = num_pages
        shape = (num_pages, PAGE_SIZE, arch.num_kv_heads, arch.head_dim)
        cos, sin = map(torch.from_numpy, rope_tables(arch.head_dim, arch.rope_theta, max_len))
        self._layers = [
            KVPages(
                arch=arch,
                k=torch.zeros(shape, dtype=dtype),
                v=torch.zeros(shape, dtype=dtype),
                cos=cos,
                sin=sin,
            )
            for _ in range(arch.num_layers)
        ]

    def layer(self, index: int) -> KVPages:
        """Return the pages of one layer."""
        return self._layers[index]

    def read(self, layer: int, page: int) -> tuple[F32, F32]:
        """Return copies of K and V of one page, float32 of shape (16, kv_heads, D)."""
        pages = self._layers[layer]
        k, v = (t[page].to(torch.float32, copy=True).numpy() for t in (pages.k, pages.v))
        return k, v

    def zero(self, pages: Sequence[int]) -> None:
        """Zero pages before a sequence takes them."""
        for layer in self._layers:
            layer.k[list(pages)] = 0
            layer.v[list(pages)] = 0


class ReferenceBackend:
    """Backend in plain torch.

    Args:
        kv_dtype: precision that the pages hold, "f16" or "f32".
        activation_groups: round the inputs of quantized matrices to int8 first, as the fast CPU
            kernels do; they then agree to rounding error.
        bfloat16_activations: round the inputs of all matrices to bfloat16 first, as the CUDA
            kernels do.
        reason: why this back end was chosen, for `info`.
    """

    name = "reference"

    def __init__(
        self,
        *,
        kv_dtype: Literal["f16", "f32"] = "f16",
        activation_groups: bool = False,
        bfloat16_activations: bool = False,
        reason: str = "plain torch, row by row",
    ) -> None:
        self.reason = reason
        self._kv_dtype = _KV_DTYPES[kv_dtype]
        self._round = _rounding(activation_groups, bfloat16_activations)
        self._weight_bytes = 0

    def matrix(self, parts: Sequence[Tensor]) -> list[Part]:
        """Dequantize matrices of equal K; they stay apart and their outputs are joined."""
        return [
            Part(values=self._take(part), quantized=isinstance(part, QuantizedTensor))
            for part in parts
        ]

    def vector(self, tensor: Tensor) -> TorchTensor:
        """Take a vector as float32."""
        return self._take(tensor)

    def kv_cache(self, arch: Arch, num_pages: int, max_len: int) -> ReferenceKVCache:
        """Allocate zeroed pages and RoPE tables for positions < max_len."""
        return ReferenceKVCache(arch, num_pages, max_len, self._kv_dtype)

    def compile(
        self, forward: Callable[[Ops], TorchTensor], *, max_rows: int, max_logits: int
    ) -> ReferenceStep:
        """Return a step that calls `forward` anew each time, single-threaded."""
        return ReferenceStep(forward, self._round, max_rows, max_logits)

    def compile_draft(
        self, forward: Callable[[DraftOps], None], target: Step, *, max_rows: int, max_k: int
    ) -> Callable[[DraftRows], Int32]:
        """Return a step that calls `forward` anew each time, single-threaded."""
        assert isinstance(target, ReferenceStep), "the target's step is of this back end"

        def step(rows: DraftRows) -> Int32:
            assert 1 <= len(rows.token_ids) <= max_rows, "rows beyond what was compiled"
            assert 1 <= rows.k <= max_k, "drafts beyond what was compiled"
            ops = ReferenceDraftOps(rows, self._round, target.kept)
            with torch.inference_mode(), _one_thread(), suppress(_Drafted):
                forward(ops)
            return np.stack(ops.drafted, axis=1)

        return step

    def weight_bytes(self) -> int:
        """Return the bytes of float32 weights held so far."""
        return self._weight_bytes

    def _take(self, tensor: Tensor) -> TorchTensor:
        """Return the tensor as float32 at torch's own alignment."""
        values = torch.from_numpy(np.ascontiguousarray(tensor.dequantize())).clone()
        self._weight_bytes += values.nbytes
        return values


class ReferenceStep:
    """A forward that is called anew each time."""

    def __init__(
        self, forward: Callable[[Ops], TorchTensor], rounding: Rounding, most: int, most_logits: int
    ) -> None:
        self._forward, self._round = forward, rounding
        self._most, self._most_logits = most, most_logits
        self.runs = 0
        self.kept: list[TorchTensor] = []

    def __call__(self, rows: Rows) -> StepResult:
        """Run the forward over `rows`."""
        assert 1 <= len(rows.token_ids) <= self._most, "rows beyond what was compiled"
        assert len(rows.logit_rows) <= self._most_logits, "logit rows beyond what was compiled"
        self.runs += 1
        ops = ReferenceOps(rows, self._round)
        with torch.inference_mode(), _one_thread():
            logits = self._forward(ops).numpy()
        self.kept = ops.kept
        # numpy's argmax takes the first of equals; torch's promises no order.
        return StepResult(
            logits=logits, argmax=logits.argmax(axis=1).astype(np.int32), run=self.runs
        )


class _SharedOps:
    """The ops of any forward over rows of `token_ids`."""

    def __init__(self, token_ids: Int32, rounding: Rounding) -> None:
        self._token_ids = token_ids
        self._round = rounding

    def embed(self, table: list[Part]) -> TorchTensor:
        """Return the embedding rows of the token ids."""
        (part,) = table
        return part.values[torch.from_numpy(self._token_ids.astype(np.int64))]

    def rms_norm(self, x: TorchTensor, weight: TorchTensor, eps: float) -> TorchTensor:
        """Return x / sqrt(mean(x**2) + eps) * weight."""
        return _by_row(lambda row: row / torch.sqrt((row * row).mean() + eps) * weight, x)

    def linear(
        self, x: TorchTensor, weight: list[Part], residual: TorchTensor | None = None
    ) -> TorchTensor:
        """Return x @ weight.T, plus residual if given."""
        product = _by_row(lambda row: self._project(row, weight), x)
        return product if residual is None else product + residual

    def gated(self, gate_up: TorchTensor) -> TorchTensor:
        """Return silu(gate) * up."""

        def activate(row: TorchTensor) -> TorchTensor:
            gate, up = row.chunk(2)
            return gate.clone() * torch.sigmoid(gate.clone()) * up

        return _by_row(activate, gate_up)

    def _project(self, row: TorchTensor, weight: list[Part]) -> TorchTensor:
        """Multiply one row by every part, rounding it first where a fast kernel would."""
        return torch.cat([part.values.mv(self._round(row, part.quantized)) for part in weight])


class ReferenceOps(_SharedOps):
    """The ops of one target step over `rows`."""

    def __init__(self, rows: Rows, rounding: Rounding) -> None:
        super().__init__(rows.token_ids, rounding)
        self._rows = rows
        self.kept: list[TorchTensor] = []

    def rope_append(self, qkv: TorchTensor, kv: KVPages) -> TorchTensor:
        """Rotate q and k, write k and v to the pages, return q; padding rows write nothing."""
        arch = kv.arch
        heads = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
        out = torch.zeros(len(qkv), arch.num_heads * arch.head_dim)
        for r, row in enumerate(qkv):
            position = int(self._rows.positions[r])
            if position < 0:
                continue
            q, k, v = row.clone().view(-1, arch.head_dim).split(heads)
            cos, sin = kv.cos[position].clone(), kv.sin[position].clone()
            page = int(self._rows.page_table[self._rows.sequences[r], position // PAGE_SIZE])
            kv.k[page, position % PAGE_SIZE] = _rotate(k, cos, sin, arch.rope_interleaved)
            kv.v[page, position % PAGE_SIZE] = v
            out[r] = _rotate(q, cos, sin, arch.rope_interleaved).flatten()
        return out

    def attention(self, q: TorchTensor, kv: KVPages) -> TorchTensor:
        """Return causal attention over the pages; zeros for padding rows."""
        out = torch.zeros_like(q)
        for r, row in enumerate(q):
            length = int(self._rows.positions[r]) + 1
            if length > 0:
                table = self._rows.page_table[self._rows.sequences[r]]
                out[r] = _attend(row.clone(), kv, table[: -(-length // PAGE_SIZE)], length)
        return out

    def keep(self, x: TorchTensor) -> None:
        """Keep x."""
        self.kept.append(x)

    def logits(self, x: TorchTensor, weight: list[Part]) -> TorchTensor:
        """Return the logits of the wanted rows."""
        wanted = self._rows.logit_rows
        if not len(wanted):
            return torch.zeros(0, sum(len(part.values) for part in weight))
        return self.linear(x[torch.from_numpy(wanted.astype(np.int64))], weight)


class _Drafted(Exception):
    """Every token that was asked for is drafted."""


class ReferenceDraftOps(_SharedOps):
    """The ops of one draft; `drafted` grows by an int32 array of shape (B,) with every pick."""

    def __init__(self, rows: DraftRows, rounding: Rounding, kept: Sequence[TorchTensor]) -> None:
        super().__init__(rows.token_ids, rounding)
        self._rows = rows
        self._kept = kept
        self.drafted: list[Int32] = []

    def kept(self, index: int) -> TorchTensor:
        """Return the rows of a kept value that chose the anchors."""
        return self._kept[index][torch.from_numpy(self._rows.kept_rows.astype(np.int64))]

    def rope(self, q: TorchTensor, kv: KVPages, num_heads: int) -> TorchTensor:
        """Rotate q by the rows' positions."""
        out = torch.zeros_like(q)
        for r, row in enumerate(q):
            position = int(self._rows.positions[r]) + len(self.drafted)
            cos, sin = kv.cos[position].clone(), kv.sin[position].clone()
            heads = row.clone().view(num_heads, -1)
            out[r] = _rotate(heads, cos, sin, kv.arch.rope_interleaved).flatten()
        return out

    def attention(self, q: TorchTensor, kv: KVPages, num_heads: int) -> TorchTensor:
        """Return attention over the positions before the anchors."""
        assert q.shape[1] == num_heads * kv.arch.head_dim, "a query has the target's head size"
        out = torch.zeros_like(q)
        for r, row in enumerate(q):
            length = int(self._rows.positions[r])
            pages = self._rows.page_table[r, : -(-length // PAGE_SIZE)]
            out[r] = _attend(row.clone(), kv, pages, length)
        return out

    def pick(self, x: TorchTensor, weight: list[Part], token_ids: Int32) -> None:
        """Choose the rows' next tokens; raises once all are drafted."""
        logits: F32 = self.linear(x, weight).numpy()
        picked = [self._pick(r, row, token_ids) for r, row in enumerate(logits)]
        self._token_ids = np.array(picked, np.int32)
        self.drafted.append(self._token_ids)
        if len(self.drafted) == self._rows.k:
            raise _Drafted

    def _pick(self, r: int, logits: F32, token_ids: Int32) -> int:
        rows, scores = self._rows, np.where(np.isnan(logits), np.float32(-np.inf), logits)
        if rows.temperatures[r] > 0:
            key = NoiseKey(
                seed=int(rows.seeds[r]),
                choice=int(rows.choices[r]),
                position=int(rows.positions[r]) + len(self.drafted) + 1,
            )
            noise = gumbel(noise_bits(key, int(token_ids[-1]) + 1)[token_ids])
            with np.errstate(over="ignore"):
                scores = scores / rows.temperatures[r] + noise
        return int(token_ids[scores.argmax()])


def _rounding(activation_groups: bool, bfloat16_activations: bool) -> Rounding:
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


def _by_row(op: Callable[[TorchTensor], TorchTensor], x: TorchTensor) -> TorchTensor:
    """Apply `op` to a fresh copy of each row."""
    return torch.stack([op(row.clone()) for row in x])


def _rotate(x: TorchTensor, cos: TorchTensor, sin: TorchTensor, interleaved: bool) -> TorchTensor:
    """Turn each pair of columns of x (heads, D) by the angles of cos and sin (D / 2,)."""
    half = x.shape[1] // 2
    a, b = (x[:, ::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    a, b = a.contiguous(), b.contiguous()
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=2 if interleaved else 1)
    return turned.flatten(1)


def _attend(
    q: TorchTensor, kv: KVPages, pages: np.ndarray[tuple[int, ...], np.dtype[np.int32]], length: int
) -> TorchTensor:
    """Attend from one row q (heads * D,) to the first `length` positions of `pages`."""
    index = torch.from_numpy(pages.astype(np.int64))
    keys, values = (t[index].flatten(0, 1)[:length].float() for t in (kv.k, kv.v))
    groups = q.view(kv.arch.num_kv_heads, -1, kv.arch.head_dim)
    out = []
    for head, group in enumerate(groups):
        scores = group.clone() @ keys[:, head].T.contiguous() / math.sqrt(kv.arch.head_dim)
        out.append(torch.softmax(scores, dim=1) @ values[:, head].contiguous())
    return torch.cat(out).flatten()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
