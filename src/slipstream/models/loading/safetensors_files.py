"""Safetensors files of a folder, one or sharded, read from a memory map tensor by tensor.

The whole of each header is validated before anything is read: types, shapes, extents. The bytes of
a tensor are those of the map, so nothing is copied that a back end does not copy; pages of a tensor
that was read are given back when the next but one is asked for, so that what stays resident is what
the back end has made.

Format: https://github.com/huggingface/safetensors, "Format". Its library has no bfloat16 without
torch, which loading does not import.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import LoadError
from slipstream.models.loading.checkpoint import TensorReader
from slipstream.models.weights import DenseTensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER = 100 << 20  # the format's own limit
_DTYPES = {"F32": ("f32", "<f4"), "F16": ("f16", "<f2"), "BF16": ("bf16", "<u2")}
_WIDTHS = {"I64": 8, "F32": 4, "U32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1}
_MAX_NAME = 255  # characters of a file's name: no file system has longer ones
_HELD = 2  # tensors whose pages stay: one that is being repacked, one that is joined to it


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor.

    Attributes:
        path: its file.
        dtype: as the file names it, e.g. "BF16".
        offset, num_bytes: where it lies in the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class SafetensorsFiles:
    """The tensors of a folder.

    Attributes:
        stamps: size and modification time of each file when its header was read.
        headers: each file's header, as it is.
    """

    entries: Mapping[str, Entry]
    stamps: Mapping[Path, tuple[int, int]]
    headers: Mapping[Path, bytes]

    @contextmanager
    def open(self) -> Iterator[Maps]:
        """Map the files.

        Raises:
            LoadError: one is gone, unreadable, or not the file whose header was read.
        """
        with ExitStack() as stack:
            maps = {}
            for path, stamp in self.stamps.items():
                source = stack.enter_context(_opened(path))
                if _stamp(source) != stamp:
                    raise LoadError(
                        f"{path.name} changed after its header was read", hint="load it again"
                    )
                # Not closed here: arrays may outlive the block, and they keep it.
                maps[path] = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
            yield Maps(self.entries, maps)


class Maps:
    """Mapped files."""

    def __init__(self, entries: Mapping[str, Entry], maps: Mapping[Path, mmap.mmap]) -> None:
        self._entries, self._maps = entries, maps
        self._held: deque[Entry] = deque()

    def raw(self, name: str, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a tensor as a read-only view of a numpy type."""
        entry = self._entries[name]
        self._hold(entry)
        count = entry.num_bytes // np.dtype(dtype).itemsize
        values = np.frombuffer(self._maps[entry.path], dtype, count, entry.offset)
        return values.reshape(entry.shape)

    def forget(self) -> None:
        """Give the pages of what is held back; what is read again is mapped again."""
        for entry in self._held:
            self._release(entry)

    def _hold(self, entry: Entry) -> None:
        self._held.append(entry)
        if len(self._held) > _HELD:
            self._release(self._held.popleft())

    def _release(self, entry: Entry) -> None:
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = entry.offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = entry.offset + entry.num_bytes - first
        self._maps[entry.path].madvise(mmap.MADV_DONTNEED, first, length)


class DenseSource:
    """A folder of dense tensors as a `Source`."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self._files = files
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: entry.shape for name, entry in files.entries.items()
        }

    @contextmanager
    def open(self) -> Iterator[TensorReader]:
        """Map the files."""
        with self._files.open() as maps:
            yield _DenseReader(self._files.entries, maps)


class _DenseReader:
    """A `TensorReader` that can also let go of what it has handed out."""

    def __init__(self, entries: Mapping[str, Entry], maps: Maps) -> None:
        self._entries, self._maps = entries, maps
        self.forget = maps.forget

    def rows(self, name: str, low: int, high: int) -> DenseTensor:
        """Return the outputs [low, high) of a matrix; the pages of those before are given back."""
        self.forget()
        return self(name).rows(low, high)

    def __call__(self, name: str) -> DenseTensor:
        dtype = self._entries[name].dtype
        if dtype not in _DTYPES:
            raise LoadError(
                f"tensor {name} must be {', '.join(_DTYPES)}, got {dtype}",
                hint="quantized folders are read in MLX's format alone",
            )
        ours, stored = _DTYPES[dtype]
        return DenseTensor(values=self._maps.raw(name, stored), dtype=ours)


def read_files(folder: Path) -> SafetensorsFiles:
    """Read the headers of a folder's safetensors files.

    Raises:
        LoadError: a file is missing, damaged or truncated, or a tensor is in two of them.
    """
    entries: dict[str, Entry] = {}
    stamps: dict[Path, tuple[int, int]] = {}
    headers: dict[Path, bytes] = {}
    for path in _find(folder):
        with _opened(path) as source:
            stamps[path] = _stamp(source)
            headers[path] = _read_header(path, source, stamps[path][0])
        for name, entry in _parse(path, headers[path], stamps[path][0]).items():
            if name in entries:
                raise LoadError(f"tensor {name} is in {entries[name].path.name} and {path.name}")
            entries[name] = entry
    return SafetensorsFiles(entries=entries, stamps=stamps, headers=headers)


def _find(folder: Path) -> list[Path]:
    """Return the files: those of the index, or the only one."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise LoadError(f"the folder has neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    try:
        block = json.loads(index.read_text(encoding="utf-8"))
        names = sorted({str(name) for name in block["weight_map"].values()})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{INDEX} cannot be read: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise LoadError(f"{INDEX} names a file outside of the folder: {name!r}")
        if len(name) > _MAX_NAME or not (folder / name).is_file():
            raise LoadError(f"{name:.80}, which {INDEX} names, is missing", hint="fetch the rest")
    return [folder / name for name in names]


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise LoadError(f"{path.name} cannot be opened: {error.strerror}") from error


def _stamp(source: Any) -> tuple[int, int]:
    status = os.fstat(source.fileno())
    return status.st_size, status.st_mtime_ns


def _read_header(path: Path, source: Any, size: int) -> bytes:
    length = int.from_bytes(source.read(8), "little")
    if not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise LoadError(f"{path.name} is not a safetensors file, or it is truncated")
    header = source.read(length)
    if len(header) != length:
        raise LoadError(f"{path.name} is truncated inside its header")
    return bytes(header)


def _parse(path: Path, header: bytes, size: int) -> dict[str, Entry]:
    try:
        block = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path.name}: the header is damaged: {error}") from error
    if not isinstance(block, dict):
        raise LoadError(f"{path.name}: the header must be an object")
    block.pop("__metadata__", None)
    start = 8 + len(header)
    return {name: _entry(path, name, item, start, size) for name, item in block.items()}


def _entry(path: Path, name: str, item: Any, start: int, size: int) -> Entry:
    try:
        dtype, shape = str(item["dtype"]), tuple(item["shape"])
        begin, end = item["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        raise LoadError(f"{path.name}: the entry of tensor {name} is damaged") from None
    if not whole or end < begin:
        raise LoadError(f"{path.name}: the entry of tensor {name} is damaged")
    if start + end > size:
        raise LoadError(
            f"{path.name} is truncated: tensor {name} ends at byte {start + end}, the file at "
            f"byte {size}",
            hint="fetch the file again",
        )
    width = _WIDTHS.get(dtype)
    if width is not None and math.prod(shape) * width != end - begin:
        raise LoadError(
            f"{path.name}: tensor {name} of shape {list(shape)} and {dtype} must have "
            f"{math.prod(shape) * width} bytes, got {end - begin}"
        )
    return Entry(path=path, dtype=dtype, shape=shape, offset=start + begin, num_bytes=end - begin)
