"""Compiling small functions on a GPU, with the plain function to fall back on.

Element-wise work between the products would take as long as the products; torch.compile fuses it.
Only functions that one layer runs are compiled, so a model of any depth compiles in seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])
_log = logging.getLogger(__name__)
_SHAPES = 64  # generation, training and evaluation bring shapes of their own


def fuse(function: F, device: torch.device) -> F:
    """Return the function compiled for a GPU; on a CPU, and where compiling fails, itself."""
    if device.type != "cuda":
        return function
    torch._dynamo.config.recompile_limit = _SHAPES
    chosen: list[Callable[..., Any]] = [torch.compile(function, dynamic=False), function]
    runs = [0]

    def run(*args: Any) -> Any:
        try:
            result = chosen[0](*args)
        except Exception as error:
            if runs[0] or len(chosen) == 1:
                raise
            _log.warning("%s is not compiled: %s", function.__name__, str(error).splitlines()[:1])
            del chosen[0]
            return chosen[0](*args)
        runs[0] += 1
        return result

    return cast(F, run)
