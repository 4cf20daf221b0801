"""The reference back end: every op in plain torch, the definition of correct.

Fast back ends are tested against it; it serves when no compiled one is there. Torch's own kernels
are not row invariant (a matrix product may take another path at 3 rows than at 1), so nothing here
ever sees two rows: each op takes its rows one by one, each row a fresh copy, so that shape and
alignment are the same whatever rides along. A step runs on one thread, so the reduction order does
not depend on the machine's setting. Attention reads K and V back from the pages, rounded to
the cache's dtype, this step's own rows included. It runs every family that `Arch` can describe.

The ops themselves are in `kernels.rowwise`. Not here: speed. A weight is held as float32 and read
once per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import numpy as np
import torch
from torch import Tensor as TorchTensor

from slipstream.kernels.ops import DraftOps, DraftRows, Int32, Ops, Rows, Step, StepResult
from slipstream.kernels.rowwise.arithmetic import Rounding, round_to_int8, rounding
from slipstream.kernels.rowwise.draft import Drafted, ReferenceDraftOps
from slipstream.kernels.rowwise.ops import Part, ReferenceOps
from slipstream.kernels.rowwise.pages import ReferenceKVCache
from slipstream.models.arch import Arch
from slipstream.models.weights import QuantizedTensor, Tensor

__all__ = ["ReferenceBackend", "ReferenceDraftOps", "ReferenceOps", "round_to_int8"]

_KV_DTYPES = {"f16": torch.float16, "f32": torch.float32}


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
    takes_pieces = False

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
        self._round = rounding(activation_groups, bfloat16_activations)
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
            with torch.inference_mode(), _one_thread(), suppress(Drafted):
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
