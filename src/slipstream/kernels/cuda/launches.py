"""A list of kernel launches in the making, and the buffers that they pass values in.

A value is a device buffer of `max_rows` rows; the buffer returns to a free list as soon as the
forward drops the value, so the layers share a handful of buffers.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from slipstream.kernels.cuda.graphs import Launch
from slipstream.kernels.cuda.inputs import Inputs
from slipstream.kernels.cuda.kernels import StepKernels, Vector

THREADS = 256  # of a block, where nothing else decides


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


class Launches:
    """What every recorder has: launches so far, and buffers to use again."""

    def __init__(self, kernels: StepKernels, inputs: Inputs) -> None:
        self._kernels, self._inputs = kernels, inputs
        self._max_rows = inputs.max_rows
        self._launches: list[Launch] = []
        self._workspace_bytes = 0
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

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
