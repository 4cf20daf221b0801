"""Record what layers do besides attention: products, norms, activations.

Products take bfloat16: a norm is launched by the product that consumes it, which knows the rows it
wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.cuda.inputs import Inputs
from slipstream.kernels.cuda.kernels import StepKernels, Vector
from slipstream.kernels.cuda.launches import THREADS, Buffer, Launches, Normed
from slipstream.kernels.cuda.linear import CudaWeight, linear
from slipstream.kernels.cuda.pages import WHO
from slipstream.models.arch import SLOWER, Activation, unsupported

# A verify: one round of sixteen rows or a few of several sequences. More rows are mostly prompt,
# which shares weight reads whatever kernel verifies are asked to run on.
VERIFY_ROWS = 32


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


class ProductRecorder(Launches):
    """The ops of `SharedOps` but for the embedding, which differs between targets and drafts."""

    def __init__(self, kernels: StepKernels, inputs: Inputs, products: Products) -> None:
        super().__init__(kernels, inputs)
        self._products = products

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
