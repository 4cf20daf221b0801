"""`CpuBackend`: weights, pages and compiled steps on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from slipstream.errors import CapacityError, ConfigError, LoadError
from slipstream.kernels.cpu import _native
from slipstream.kernels.cpu.draft import CpuDraft, DraftRecorder
from slipstream.kernels.cpu.recorder import WHO, CpuStep, Recorder
from slipstream.kernels.ops import F32, PAGE_SIZE, DraftOps, Ops, Step, Value
from slipstream.kernels.rope import rope_tables
from slipstream.models.arch import SLOWER, Arch
from slipstream.models.weights import QuantizedTensor, Tensor, float16_numbers

ISA_PATHS = ("avx512", "portable")
SUPPORTED: frozenset[str] = frozenset()  # features of `Arch` beyond a plain llama


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

    def matrix(self, parts: Sequence[Tensor]) -> _native.Weight:
        """Pack matrices of equal K, stacked along N in order."""
        columns = {part.shape[1] for part in parts}
        if len(columns) != 1:
            raise LoadError(f"fused matrices must have one width, got {sorted(columns)}")
        weight = _native.Weight(self._arena)
        for part in parts:
            if isinstance(part, QuantizedTensor):
                _add_quantized(weight, part)
            else:
                values = np.ascontiguousarray(part.values)
                if part.dtype == "f16":
                    values = values.view(np.uint16)
                weight.add_dense(part.dtype, values)
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


def _add_quantized(weight: _native.Weight, part: QuantizedTensor) -> None:
    supported = {(4, 0, True), (4, 8, False), (8, 128, False)}
    kind = (part.bits, part.zero, part.bias is not None)
    if kind not in supported or part.group != _native.GROUP:
        raise LoadError(
            f"the cpu back end takes groups of {_native.GROUP} with (bits, zero, bias) in "
            f"{sorted(supported)}, got groups of {part.group} with {kind}"
        )
    scale = float16_numbers(part.scale)
    bias = None if part.bias is None else float16_numbers(part.bias)
    if scale is None or (part.bias is not None and bias is None):
        raise LoadError("the cpu back end takes float16 scales and biases alone")
    weight.add_quantized(
        part.bits,
        part.zero,
        np.ascontiguousarray(part.codes),
        np.ascontiguousarray(scale).view(np.uint16),
        None if bias is None else np.ascontiguousarray(bias).view(np.uint16),
    )


class CpuKVCache:
    """fp16 pages of 16 positions: K with positions innermost, V with head_dim innermost."""

    def __init__(self, arch: Arch, num_pages: int, max_len: int) -> None:
        arch.require(SUPPORTED, WHO, SLOWER)
        attention = arch.uniform
        if attention.head_dim % PAGE_SIZE or attention.head_dim > _native.MAX_HEAD_DIM:
            raise LoadError(
                f"{WHO} takes head sizes that are multiples of {PAGE_SIZE} up to "
                f"{_native.MAX_HEAD_DIM}, got {attention.head_dim}"
            )
        self.num_pages = num_pages
        self.max_len = max_len
        self._attention = attention
        self._rope = rope_tables(attention.frequencies, max_len)
        self._pages = _native.KV(
            arch.num_layers,
            num_pages,
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            attention.rope_interleaved,
            *self._rope,
        )

    def layer(self, index: int) -> tuple[CpuKVCache, int]:
        """Return the handle that the recorder takes."""
        return self, index

    @property
    def native(self) -> _native.KV:
        """The pages as the recorded program holds them."""
        return self._pages

    @property
    def width(self) -> int:
        """Columns of q: heads times head_dim."""
        return self._attention.q_size

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self._attention.head_dim

    def read(self, layer: int, page: int) -> tuple[F32, F32]:
        """Return copies of K and V of one page, float32 of shape (16, kv_heads, D)."""
        heads, d = self._attention.num_kv_heads, self._attention.head_dim
        k = self._pages.read(layer, page, False).view(np.float16).astype(np.float32)
        v = self._pages.read(layer, page, True).view(np.float16).astype(np.float32)
        return (
            k.reshape(heads, d, PAGE_SIZE).transpose(2, 0, 1).copy(),
            v.reshape(heads, PAGE_SIZE, d).transpose(1, 0, 2).copy(),
        )

    def zero(self, pages: Sequence[int]) -> None:
        """Zero pages before a sequence takes them."""
        for page in pages:
            self._pages.zero(page)
