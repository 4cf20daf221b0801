"""`CudaBackend`: weights, pages and compiled steps on an NVIDIA GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from slipstream.errors import CapacityError, ConfigError, LoadError
from slipstream.kernels.cuda.bandwidth import copy_bandwidth
from slipstream.kernels.cuda.device import driver_version
from slipstream.kernels.cuda.draft import CudaDraft, DraftRecorder
from slipstream.kernels.cuda.graphs import CudaStep
from slipstream.kernels.cuda.inputs import Inputs
from slipstream.kernels.cuda.kernels import DraftKernels, StepKernels, Vector
from slipstream.kernels.cuda.linear import CudaWeight, pack
from slipstream.kernels.cuda.linear_kernels import TILE_ROWS
from slipstream.kernels.cuda.memory import CudaMemory
from slipstream.kernels.cuda.pages import CudaKVCache
from slipstream.kernels.cuda.products import Products
from slipstream.kernels.cuda.recorder import Recorder
from slipstream.kernels.ops import DraftOps, Ops, Step, Value
from slipstream.models.arch import Arch
from slipstream.models.weights import Tensor


class CudaBackend:
    """Runs a decoder on one GPU, row-invariant, in bfloat16 products with float32 sums.

    Args:
        kernel: how rows share weight reads: "auto", "gemv", "multirow" or "tile". The bytes are
            the same.
        tile_m: rows of a tile where kernel is "tile".
        cache: folder of compiled kernels; None compiles them anew.

    Raises:
        LoadError: there is no CUDA device, or its kernels cannot be compiled.
        ConfigError: a tile that no kernel has.
    """

    name = "cuda"
    takes_pieces = False
    device: str  # the GPU's name
    driver: str
    build: str  # tells builds of the kernels apart

    def __init__(
        self, *, kernel: str = "auto", tile_m: int = 16, cache: Path | None = None
    ) -> None:
        if not torch.cuda.is_available():
            raise LoadError(
                "there is no CUDA device that torch can use", hint="use device auto or cpu"
            )
        if kernel == "tile" and tile_m not in TILE_ROWS:
            raise ConfigError(
                f"tile_m must be one of {', '.join(map(str, TILE_ROWS))} on cuda, got {tile_m}"
            )
        self._products = Products(
            kernel=kernel, tile_m=tile_m if kernel == "tile" else TILE_ROWS[0]
        )
        self._kernels = StepKernels.load(cache)
        self._cache = cache
        self._weight_bytes = 0
        self.memory = CudaMemory()
        self.device = torch.cuda.get_device_name()
        major, minor = torch.cuda.get_device_capability()
        self.reason = f"{self.device}, compute capability {major}.{minor}"
        self.driver = driver_version()
        self.build = _build()

    def matrix(self, parts: Sequence[Tensor]) -> CudaWeight:
        """Pack matrices of equal K, stacked along N in order."""
        try:
            weight = pack(parts, "cuda", cubins=self._cache)
        except torch.OutOfMemoryError as error:
            raise self._no_room(sum(part.shape[0] * part.shape[1] for part in parts)) from error
        self._weight_bytes += weight.num_bytes
        return weight

    def adopt(self, weight: CudaWeight) -> None:
        """Count a weight that was packed elsewhere."""
        self._weight_bytes += weight.num_bytes

    def vector(self, tensor: Tensor) -> Vector:
        """Take a vector as float32."""
        vector = torch.from_numpy(tensor.dequantize()).contiguous().cuda()
        self._weight_bytes += vector.nbytes
        return vector

    def kv_cache(self, arch: Arch, num_pages: int, max_len: int) -> CudaKVCache:
        """Allocate zeroed fp16 pages, and RoPE tables for positions < max_len."""
        return CudaKVCache(arch, num_pages, max_len)

    def compile(
        self, forward: Callable[[Ops], Value], *, max_rows: int, max_logits: int
    ) -> CudaStep:
        """Record the forward and return a step that replays it."""
        max_logits = min(max_logits, max_rows)  # a row has one row of logits
        inputs = Inputs(max_rows, max_logits)
        recorder = Recorder(self._kernels, inputs, self._products, max_logits)
        forward(recorder)
        return recorder.finish()

    def compile_draft(
        self, forward: Callable[[DraftOps], None], target: Step, *, max_rows: int, max_k: int
    ) -> CudaDraft:
        """Record the draft and return a step that replays it."""
        assert isinstance(target, CudaStep), "the target's step is of this back end"
        recorder = DraftRecorder(
            self._kernels,
            DraftKernels.load(self._cache),
            Inputs(max_rows, max_rows),
            self._products,
            target,
            max_k,
        )
        forward(recorder)
        return recorder.finish_draft()

    def weight_bytes(self) -> int:
        """Return the bytes of packed weights."""
        return self._weight_bytes

    def bandwidth(self) -> tuple[float, str]:
        """Return bytes per second that the GPU's memory moves, and what measured it."""
        return copy_bandwidth(), "copy on the GPU, read and written"

    def _no_room(self, num_weights: int) -> CapacityError:
        free, total = torch.cuda.mem_get_info()
        return CapacityError(
            f"the GPU has no memory for a matrix of {num_weights} weights beside "
            f"{self._weight_bytes} bytes of weights: {free} of {total} bytes are free",
            hint="use a smaller model or device cpu",
        )


@cache
def _build() -> str:
    """Return a hash of the kernels and of what launches them."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
