"""The two implementations of a pick behind one signature: numpy, and the compiled kernels."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from slipstream.engine.sampling import reference
from slipstream.engine.sampling.reference import Bool
from slipstream.kernels.noise import NoiseKey
from slipstream.kernels.ops import F32, Int32


class PickKernel(Protocol):
    """Chooses tokens; `reference` documents both functions. Implementations agree bit for bit."""

    def pick(
        self,
        logits: F32,
        ids: Int32,
        values: F32,
        allowed: Bool | None,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        key: NoiseKey,
    ) -> int:
        """Return the token that one row gives, or -1."""

    def summarize(self, logits: F32, num_top: int) -> tuple[float, float, Int32] | None:
        """Return largest logit, sum of exp(logit - largest), and the ids of the top ones."""


class _Reference:
    pick = staticmethod(reference.pick)
    summarize = staticmethod(reference.summarize)


class _Native:
    """The compiled kernels of one ISA path; the interpreter lock is released meanwhile."""

    def __init__(self, isa: str) -> None:
        from slipstream.kernels.cpu import _native

        self._native = _native
        self._isa = isa

    def pick(
        self,
        logits: F32,
        ids: Int32,
        values: F32,
        allowed: Bool | None,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        key: NoiseKey,
    ) -> int:
        token: int = self._native.pick(
            self._isa,
            logits,
            ids,
            values,
            allowed,
            float(np.float32(temperature)),
            min(top_k, len(logits)),
            top_p,
            min_p,
            key.seed,
            key.choice,
            key.position,
        )
        return token

    def summarize(self, logits: F32, num_top: int) -> tuple[float, float, Int32] | None:
        summary: tuple[float, float, Int32] | None = self._native.summarize(
            self._isa, logits, num_top
        )
        return summary


def reference_kernel() -> PickKernel:
    """Return the numpy implementation."""
    return _Reference()


def native_kernel(isa: str) -> PickKernel:
    """Return the compiled implementation.

    Args:
        isa: "avx512" or "portable", one that this processor runs.

    Raises:
        ImportError: the compiled kernels are missing.
    """
    return _Native(isa)


def kernel_beside(backend: object) -> PickKernel:
    """Return what picks on the host beside a back end: compiled where it is built, else numpy.

    The bytes agree. The reference back end stays numpy throughout.
    """
    isa = getattr(backend, "isa", None)
    if getattr(backend, "name", None) == "cuda":  # for what a step does not sample itself
        isa = built_isa()
    return reference_kernel() if isa is None else native_kernel(isa)


def built_isa() -> str | None:
    """Return the best ISA path of the compiled kernels here, None where there are none."""
    try:
        from slipstream.kernels.cpu import _native
    except ImportError:
        return None
    return "avx512" if _native.avx512_supported() else "portable"
