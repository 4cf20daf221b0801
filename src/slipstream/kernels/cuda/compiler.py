"""Compiles CUDA C++ at run time and launches it on torch's current stream.

NVRTC turns source text into a cubin for one architecture, so that a user needs neither nvcc nor
CUDA headers, and compiling needs no GPU: that is how every architecture is checked in CI. Kernels
are launched through the driver (`cuLaunchKernelEx`), which captures into a torch CUDA graph like
any other work of the stream and, unlike torch's own launcher, takes clusters and programmatic
dependent launch.

A cubin is cached in a folder under the hash of all that went into it: sources, options, names and
the NVRTC version. The cache is a convenience; whatever cannot be read or written is compiled again.

Sources may include the headers (`*.cuh`) beside them and nothing else.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import CapacityError, LoadError

Dim3 = tuple[int, int, int]

SOURCES = Path(__file__).parent / "source"
_CACHE_FORMAT = 1  # of the cubin files in the cache folder


@dataclass(frozen=True, kw_only=True)
class Device:
    """What kernels are built for.

    Attributes:
        arch: e.g. "sm_90".
        processors: multiprocessors.
        shared_bytes: shared memory that one block may ask for.
    """

    arch: str
    processors: int
    shared_bytes: int

    @property
    def has_clusters(self) -> bool:
        """True where blocks form clusters and kernels may overlap: from sm_90 on."""
        return int(self.arch.removeprefix("sm_")) >= 90


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """Machine code of one architecture.

    Attributes:
        image: the cubin.
        symbols: the mangled name of each kernel that was asked for.
        log: the compiler's warnings.
    """

    image: bytes
    symbols: Mapping[str, str]
    log: str = ""


def compile_kernels(
    source: Path,
    *,
    names: Sequence[str],
    defines: Mapping[str, int | str] | None = None,
    arch: str | None = None,
    cache: Path | None = None,
) -> Module:
    """Compile a source file and load it on the current device.

    Args:
        source: a `.cu` file; headers beside it may be included.
        names: kernels to export: `extern "C"` names or template instances, e.g. "step<2>".
        defines: macros.
        arch: e.g. "sm_90"; None takes the current device's.
        cache: folder of compiled cubins; None compiles anew.

    Raises:
        LoadError: NVRTC is missing or rejects the source.
    """
    return Module(
        compile_cubin(
            source, names=names, defines=defines, arch=arch or current_device().arch, cache=cache
        )
    )


def compile_cubin(
    source: Path,
    *,
    names: Sequence[str],
    arch: str,
    defines: Mapping[str, int | str] | None = None,
    cache: Path | None = None,
) -> Cubin:
    """Compile a source file for `arch`; needs no GPU. Arguments as for `compile_kernels`."""
    headers = {path.name: path.read_bytes() for path in sorted(source.parent.glob("*.cuh"))}
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in sorted((defines or {}).items())),
    ]
    text = source.read_bytes()
    file = None
    if cache is not None:
        parts = [_CACHE_FORMAT, nvrtc_version(), options, list(names), source.name]
        content = [json.dumps(parts).encode(), text, *headers.values(), *map(str.encode, headers)]
        digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in content))
        file = cache / f"{digest.hexdigest()[:32]}.cubin"
        if (found := _read_cached(file)) is not None:
            return found
    cubin = _nvrtc_compile(source.name, text, headers, options, names)
    if file is not None:
        _write_cached(file, cubin)
    return cubin


class Module:
    """Kernels loaded on the current device; they stay loaded as long as the process runs."""

    def __init__(self, cubin: Cubin) -> None:
        import torch
        from cuda.bindings import driver

        torch.zeros(1, device="cuda")  # the driver needs torch's context to be current
        self._module = _check(driver.cuModuleLoadData(cubin.image), "load a module")
        self._symbols = cubin.symbols

    def kernel(self, name: str, *, shared_bytes: int = 0) -> Kernel:
        """Return a kernel by the name that it was compiled under.

        Args:
            shared_bytes: dynamic shared memory of every launch.
        """
        from cuda.bindings import driver

        symbol = self._symbols[name].encode()
        function = _check(driver.cuModuleGetFunction(self._module, symbol), f"find {name}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        # Only ever raised: others may launch the same kernel with more.
        if shared_bytes > _check(driver.cuFuncGetAttribute(limit, function), f"size {name}"):
            _check(driver.cuFuncSetAttribute(function, limit, shared_bytes), f"size {name}")
        return Kernel(name, function, shared_bytes)


class Kernel:
    """One kernel, launched on torch's current stream."""

    def __init__(self, name: str, function: Any, shared_bytes: int) -> None:
        self.name = name
        self._function = function
        self._shared_bytes = shared_bytes

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        arguments: Sequence[Any],
        *,
        cluster: int = 1,
        overlap: bool = False,
    ) -> None:
        """Launch the kernel.

        Args:
            grid: blocks along x, y, z.
            block: threads along x, y, z.
            arguments: torch tensors and None (as pointers), ints (as 32-bit integers), floats (as
                float32) and ctypes values.
            cluster: blocks along x that share a cluster (sm_90 and later).
            overlap: start while the stream's previous kernel still runs. The kernel must execute
                `griddepcontrol.wait` in every thread before it touches what others wrote, or may
                still read (sm_90 and later).
        """
        import torch
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = self._shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs = self._attributes(cluster, overlap)
        config.numAttrs = len(config.attrs)
        values, kinds = _pack_arguments(arguments)
        _check(
            driver.cuLaunchKernelEx(config, self._function, (values, kinds), 0),
            f"launch {self.name}",
        )

    def blocks_per_multiprocessor(self, threads: int) -> int:
        """Return how many blocks of `threads` one multiprocessor holds at a time."""
        from cuda.bindings import driver

        query = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        return int(_check(query(self._function, threads, self._shared_bytes), "ask occupancy"))

    def max_clusters(self, threads: int, cluster: int) -> int:
        """Return how many clusters of `cluster` blocks the device holds at a time."""
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.attrs = self._attributes(cluster, overlap=False)
        config.numAttrs = len(config.attrs)
        return int(
            _check(driver.cuOccupancyMaxActiveClusters(self._function, config), "ask clusters")
        )

    def registers(self) -> tuple[int, int]:
        """Return registers and spilled bytes of a thread."""
        from cuda.bindings import driver

        kinds = driver.CUfunction_attribute
        return tuple(  # type: ignore[return-value]
            int(_check(driver.cuFuncGetAttribute(kind, self._function), "ask registers"))
            for kind in (
                kinds.CU_FUNC_ATTRIBUTE_NUM_REGS,
                kinds.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
            )
        )

    @staticmethod
    def _attributes(cluster: int, overlap: bool) -> list[Any]:
        from cuda.bindings import driver

        attributes = []
        if cluster > 1:
            shape = driver.CUlaunchAttribute()
            shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape.value.clusterDim.x = cluster
            shape.value.clusterDim.y = shape.value.clusterDim.z = 1
            attributes.append(shape)
        if overlap:
            early = driver.CUlaunchAttribute()
            ids = driver.CUlaunchAttributeID
            early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        return attributes


def current_device() -> Device:
    """Describe torch's current device."""
    import torch
    from cuda.bindings import driver

    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    limit = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return Device(
        arch=f"sm_{properties.major}{properties.minor}",
        processors=properties.multi_processor_count,
        shared_bytes=int(_check(driver.cuDeviceGetAttribute(limit, index), "ask its limits")),
    )


def _pack_arguments(arguments: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values: list[Any] = []
    kinds: list[Any] = []
    for argument in arguments:
        if argument is None or hasattr(argument, "data_ptr"):
            values.append(0 if argument is None else argument.data_ptr())
            kinds.append(ctypes.c_void_p)
        elif isinstance(argument, int):
            values.append(argument)
            kinds.append(ctypes.c_int)
        elif isinstance(argument, float):
            values.append(argument)
            kinds.append(ctypes.c_float)
        else:
            values.append(argument.value)
            kinds.append(type(argument))
    return tuple(values), tuple(kinds)


def _check(result: tuple[Any, ...], action: str) -> Any:
    """Return what a driver call answered, or raise its error."""
    from cuda.bindings import driver

    status, *answer = result
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise CapacityError(f"the GPU has no memory left to {action}")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver could not {action}: {status.name}")
    return answer[0] if len(answer) == 1 else answer or None


def nvrtc_version() -> list[int]:
    """Return NVRTC's major and minor version.

    Raises:
        LoadError: NVRTC is missing.
    """
    _, major, minor = _nvrtc().nvrtcVersion()
    return [major, minor]


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # finds the library, or raises
    except (ImportError, RuntimeError) as error:
        raise LoadError(
            f"the cuda back end compiles its kernels with NVRTC, which is missing: {error}",
            hint="pip install 'slipstream[cuda]'",
        ) from error
    return nvrtc


def _nvrtc_compile(
    file: str,
    text: bytes,
    headers: Mapping[str, bytes],
    options: Sequence[str],
    names: Sequence[str],
) -> Cubin:
    nvrtc = _nvrtc()
    status, program = nvrtc.nvrtcCreateProgram(
        text,
        file.encode(),
        len(headers),
        list(headers.values()),
        [name.encode() for name in headers],
    )
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise LoadError(f"NVRTC could not take {file}: {status.name}")
    try:
        for name in names:
            nvrtc.nvrtcAddNameExpression(program, name.encode())
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _buffer(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise LoadError(f"NVRTC rejects {file} ({status.name}):\n{log}")
        image = _buffer(nvrtc, "CUBIN", program)
        symbols = {
            name: nvrtc.nvrtcGetLoweredName(program, name.encode())[1].decode() for name in names
        }
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(image=image, symbols=symbols, log=log)


def _buffer(nvrtc: Any, what: str, program: Any) -> bytes:
    """Return what NVRTC writes into a caller's buffer of the size it names."""
    size = int(getattr(nvrtc, f"nvrtcGet{what}Size")(program)[1])
    data = b" " * max(size, 2)  # Python shares objects of one byte, which must not be written to
    getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    return data[:size]


def _read_cached(file: Path) -> Cubin | None:
    """Return a cached cubin, or None where there is no sound one."""
    try:
        head, _, image = file.read_bytes().partition(b"\n")
        entry = json.loads(head)
        if hashlib.sha256(image).hexdigest() != entry["sha256"]:
            return None
        return Cubin(image=image, symbols=entry["symbols"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cached(file: Path, cubin: Cubin) -> None:
    """Store a cubin atomically, or not at all."""
    digest = hashlib.sha256(cubin.image).hexdigest()
    head = json.dumps({"sha256": digest, "symbols": dict(cubin.symbols)}).encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(head + b"\n" + cubin.image)
        os.replace(temporary, file)
    except OSError:
        return
