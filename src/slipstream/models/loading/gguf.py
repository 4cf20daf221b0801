"""Reader of GGUF files (versions 2 and 3): the metadata, the tensor directory, the tensors.

The usual reader builds an array object for each part of each of 100,000 vocabulary strings, two
seconds for a 98 MB file; this one takes a twentieth of a second. `read_gguf` validates the whole
header, each tensor's encoding, shape, alignment and extent included, before it returns, so a file
that opens can be read to its end. Tensors are read one at a time with plain reads and may be let
go one at a time.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Big-endian files, files split
into parts and version 1 are refused.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np

from slipstream.errors import LoadError
from slipstream.models.loading.blocks import Bytes
from slipstream.models.loading.cursor import Cursor, Value
from slipstream.models.loading.formats import Format, find_format
from slipstream.models.weights import Tensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16  # files in the wild have some 50
MAX_TENSORS = 1 << 16  # the deepest models have some thousands
MAX_DIMS = 4  # GGML's own limit
DEFAULT_ALIGNMENT = 32  # the format's, when general.alignment is absent
_MIN_PAIR_BYTES = 8 + 4 + 1  # key length, type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, dims, one dim, type, offset


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One entry of the directory.

    Attributes:
        name: e.g. "blk.0.attn_q.weight".
        format: its encoding.
        shape: outermost first, so (N, K) for a matrix; the file writes it the other way round.
        offset: file offset of its first byte.
        num_bytes: its stored size.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A validated header.

    Attributes:
        path: the file.
        stamp: size and modification time when the header was read.
        metadata: key to scalar, list of strings or numpy array.
        tensors: the directory, in the order of the data.
        data_offset: file offset of the first tensor.
    """

    path: Path
    stamp: tuple[int, int]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    data_offset: int

    @contextmanager
    def open(self) -> Iterator[BufferedReader]:
        """Open the file for `read_tensor`.

        Raises:
            LoadError: it is gone, unreadable, or not the file whose header was read.
        """
        with _open(self.path) as source:
            if _stamp(source) != self.stamp:
                raise LoadError("the file changed after its header was read", hint="load it again")
            yield source

    def read_tensor(self, source: BufferedReader, name: str) -> Tensor:
        """Read one tensor from the open file.

        Raises:
            LoadError: the file ends inside it, or the disk fails.
        """
        info = self.tensors[name]
        raw = self._read(source, name, 0, info.num_bytes)
        return info.format.decode(raw, info.shape)

    def read_rows(self, source: BufferedReader, name: str, low: int, high: int) -> Tensor:
        """Read the outputs [low, high) of one matrix, as `read_tensor`."""
        info = self.tensors[name]
        n, k = info.shape
        row_bytes = info.num_bytes // n  # a row holds whole blocks
        raw = self._read(source, name, low * row_bytes, (high - low) * row_bytes)
        return info.format.decode(raw, (high - low, k))

    def _read(self, source: BufferedReader, name: str, first: int, count: int) -> Bytes:
        """Read some bytes of a tensor."""
        info = self.tensors[name]
        raw = np.empty(count, np.uint8)
        try:
            source.seek(info.offset + first)
            num_read = source.readinto(raw.data)
        except OSError as error:
            raise LoadError(f"tensor {name} cannot be read: {error.strerror}") from error
        if num_read != count:
            raise LoadError(
                f"truncated: tensor {name} has {info.num_bytes} bytes, got {first + num_read}"
            )
        return raw


def read_gguf(path: Path) -> GgufFile:
    """Read and validate the header of a GGUF file.

    Raises:
        LoadError: the file is missing, unreadable, not a GGUF, truncated, or anything in its header
            is malformed or unsupported.
    """
    with _open(path) as source:
        size, modified = _stamp(source)
        try:
            cursor = Cursor(source, size)
            num_tensors, num_keys = _read_preamble(cursor)
            metadata = _read_metadata(cursor, num_keys)
            entries = [_read_entry(cursor) for _ in range(num_tensors)]
        except OSError as error:
            raise LoadError(f"the header cannot be read: {error.strerror}") from error
    alignment = _alignment(metadata)
    data_offset = -(-cursor.offset // alignment) * alignment
    tensors = _place(entries, data_offset, alignment, size)
    return GgufFile(
        path=path,
        stamp=(size, modified),
        metadata=metadata,
        tensors=tensors,
        data_offset=data_offset,
    )


def _open(path: Path) -> BufferedReader:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise LoadError("not a regular file")
        return path.open("rb")
    except FileNotFoundError:
        raise LoadError("no such file") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot be opened: {error}") from error


def _stamp(source: BufferedReader) -> tuple[int, int]:
    status = os.fstat(source.fileno())
    return status.st_size, status.st_mtime_ns


def _read_preamble(cursor: Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata pairs."""
    magic = cursor.take(min(len(MAGIC), cursor.num_left), "the magic")
    if magic != MAGIC:
        raise LoadError(f"not a GGUF file: it starts with {magic!r}, a GGUF with {MAGIC!r}")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = f"big-endian {swapped}" if swapped in (1, *VERSIONS) else str(version)
        raise LoadError(f"GGUF version must be one of 2, 3 (little-endian), got {kind}")
    num_tensors = cursor.count("tensors", item_bytes=_MIN_TENSOR_BYTES, limit=MAX_TENSORS)
    num_keys = cursor.count("metadata keys", item_bytes=_MIN_PAIR_BYTES, limit=MAX_KEYS)
    return num_tensors, num_keys


def _read_metadata(cursor: Cursor, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise LoadError(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(f"metadata {key!r}")
    return metadata


def _read_entry(cursor: Cursor) -> TensorInfo:
    """Read one directory entry; its offset is still relative to the data section."""
    name = cursor.string("a tensor name")
    what = f"the directory entry of {name!r}"
    num_dims = cursor.u32(what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise LoadError(f"tensor {name!r} must have 1 to {MAX_DIMS} dimensions, got {num_dims}")
    dims = tuple(cursor.u64(what) for _ in range(num_dims))
    num_elements = 1
    for dim in dims:
        num_elements *= dim
    if not 0 < num_elements < 1 << 63:
        raise LoadError(f"tensor {name!r} has impossible dimensions {list(dims)}")
    type_id = cursor.u32(what)
    try:
        form = find_format(type_id)
    except LoadError as error:
        raise LoadError(f"tensor {name!r}: {error.message}", hint=error.hint) from None
    if dims[0] % form.block:
        raise LoadError(
            f"tensor {name!r}: a row of {form.name} must be a multiple of {form.block} long, "
            f"got {dims[0]}"
        )
    return TensorInfo(
        name=name,
        format=form,
        shape=dims[::-1],
        offset=cursor.u64(what),
        num_bytes=form.num_bytes(num_elements),
    )


def _alignment(metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        raise LoadError(f"general.alignment must be a power of two up to 65536, got {alignment}")
    return alignment


def _place(
    entries: list[TensorInfo], data_offset: int, alignment: int, size: int
) -> dict[str, TensorInfo]:
    """Make offsets absolute and check them: aligned, inside the file, not overlapping."""
    names: set[str] = set()
    for item in entries:
        if item.name in names:
            raise LoadError(f"tensor {item.name!r} appears twice")
        names.add(item.name)
    tensors: dict[str, TensorInfo] = {}
    end, last = data_offset, ""
    for item in sorted(entries, key=lambda entry: entry.offset):
        if item.offset % alignment:
            raise LoadError(
                f"tensor {item.name!r}: offset must be a multiple of {alignment}, got {item.offset}"
            )
        start = data_offset + item.offset
        if start < end:
            raise LoadError(f"tensors {last!r} and {item.name!r} overlap at byte {start}")
        end, last = start + item.num_bytes, item.name
        if end > size:
            raise LoadError(
                f"truncated: tensor {item.name!r} ends at byte {end}, the file at byte {size}",
                hint="fetch the file again",
            )
        tensors[item.name] = dataclasses.replace(item, offset=start)
    return tensors
