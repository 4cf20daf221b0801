"""Recording a training step on a GPU and replaying it, with the plain function to fall back on.

A step launches some two thousand small kernels, which a host issues more slowly than the GPU works
them off. A CUDA graph issues them at once. Nothing of the arithmetic changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_PLAIN_RUNS = 2  # of each kind before it is recorded: compiling and first allocations are over


class Replay:
    """A function of tensors that works in place and returns one tensor, replayed on a GPU.

    Args:
        function: takes a kind and tensors. The kind and the tensors' shapes must decide all that
            it launches, and what it changes must stay where it is.
        device: where; on a CPU the function is called as it is.
    """

    def __init__(self, function: Callable[..., Tensor], device: torch.device) -> None:
        self._function, self._device = function, device
        self._runs: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, tuple[Any, tuple[Tensor, ...], Tensor]] = {}
        self._enabled = device.type == "cuda"
        self._pool: Any = None

    def __call__(self, kind: Hashable, *args: Tensor) -> Tensor:
        """Return what the function does."""
        if not self._enabled:
            return self._function(kind, *args)
        key = kind, tuple(arg.shape for arg in args)
        self._runs[key] = self._runs.get(key, 0) + 1
        if self._runs[key] <= _PLAIN_RUNS:
            return self._plain(kind, *args)
        if key not in self._recorded and not self._record(key, kind, args):
            return self._plain(kind, *args)
        graph, inputs, result = self._recorded[key]
        for own, given in zip(inputs, args, strict=True):
            own.copy_(given)
        graph.replay()
        return result.clone()

    def _plain(self, kind: Hashable, *args: Tensor) -> Tensor:
        # Beside the default stream, as recording runs: nothing may remember the default one.
        stream, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            result = self._function(kind, *args)
        stream.wait_stream(side)
        return result

    def _record(self, key: Hashable, kind: Hashable, args: tuple[Tensor, ...]) -> bool:
        inputs = tuple(arg.clone() for arg in args)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result = self._function(kind, *inputs)
        except RuntimeError as error:
            _log.warning("a training step cannot be recorded: %s", str(error).splitlines()[:1])
            self._enabled = False
            return False
        self._pool = graph.pool() if self._pool is None else self._pool
        self._recorded[key] = graph, inputs, result
        return True
