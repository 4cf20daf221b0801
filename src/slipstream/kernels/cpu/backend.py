"""`CpuBackend`: weights, pages and compiled steps on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from slipstream.errors import CapacityError, ConfigError, LoadError
from slipstream.kernels.cpu import _native
from slipstream.kernels.cpu.draft import CpuDraft, DraftRecorder
from slipstream.kernels.cpu.packing import add_part
from slipstream.kernels.cpu.pages import CpuKVCache
from slipstream.kernels.cpu.recorder import CpuStep, Recorder
from slipstream.kernels.ops import F32, DraftOps, Ops, Step, Value
from slipstream.models.arch import Arch
from slipstream.models.weights import Tensor, TensorInPieces

ISA_PATHS = ("avx512", "portable")


def available_threads() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CpuBackend:
    """Runs a decoder on the CPU, row-invariant and independent of the number of threads.

    Args:
        threads: team size; 0 takes the cores this process may use.
        isa: "auto", "avx512" or "portable".
        kernel: how rows share weight reads: "gemv" reads them for each row, "auto", "multirow" and
            "tile" once for up to 16 rows. The bytes are the same.

    Raises:
        ConfigError: a path that this build or processor lacks, or a bad thread count.
    """

    name = "cpu"
    takes_pieces = True

    def __init__(self, *, threads: int = 0, isa: str = "auto", kernel: str = "auto") -> None:
        if isa not in ("auto", *ISA_PATHS):
            raise ConfigError(f"isa must be one of auto, {', '.join(ISA_PATHS)}, got {isa}")
        if not 0 <= threads <= 256:
            raise ConfigError(f"threads must be in [0, 256], got {threads}")
        supported = _native.avx512_supported()
        if isa == "avx512" and not supported:
            raise ConfigError(
                "isa avx512 needs a processor and a build with AVX-512 VNNI",
                hint="use isa auto or portable",
            )
        self.isa = isa if isa != "auto" else ("avx512" if supported else "portable")
        self.threads = threads or available_threads()
        self.reason = "AVX-512 VNNI" if self.isa == "avx512" else "portable C++"
        self.share = 1 if kernel == "gemv" else _native.MAX_SHARE
        try:
            self._team = _native.Team(self.threads)
        except RuntimeError as error:
            raise CapacityError(
                f"the system grants no team of {self.threads} threads: {error}",
                hint="lower threads",
            ) from error
        self._arena = _native.Arena()

    def matrix(self, parts: Sequence[Tensor | TensorInPieces]) -> _native.Weight:
        """Pack matrices of equal K, stacked along N in order."""
        columns = {part.shape[1] for part in parts}
        if len(columns) != 1:
            raise LoadError(f"fused matrices must have one width, got {sorted(columns)}")
        weight = _native.Weight(self._arena)
        for part in parts:
            add_part(weight, part)
        return weight

    def vector(self, tensor: Tensor) -> F32:
        """Take a vector as float32."""
        return np.ascontiguousarray(tensor.dequantize(), dtype=np.float32)

    def kv_cache(self, arch: Arch, num_pages: int, max_len: int) -> CpuKVCache:
        """Reserve zeroed fp16 pages; they take memory only once written."""
        return CpuKVCache(arch, num_pages, max_len)

    def compile(
        self, forward: Callable[[Ops], Value], *, max_rows: int, max_logits: int
    ) -> CpuStep:
        """Record the forward and return a step that replays it."""
        recorder = Recorder(self.isa, self._team, max_rows, max_logits)
        forward(recorder)
        return recorder.finish(self.share)

    def compile_draft(
        self, forward: Callable[[DraftOps], None], target: Step, *, max_rows: int, max_k: int
    ) -> CpuDraft:
        """Record the draft and return a step that replays it."""
        assert isinstance(target, CpuStep), "the target's step is of this back end"
        recorder = DraftRecorder(target)
        forward(recorder)
        draft = recorder.finish(self.isa, self._team, max_rows, self.share)
        assert draft.max_k == max_k, "a draft picks max_k times"
        return draft

    def weight_bytes(self) -> int:
        """Return the bytes of packed weights."""
        return int(self._arena.used)
