"""Bounded reads of GGUF's primitive values from the front of a file.

Every length and count in a header is a claim. It is checked against what the file still holds and
against a fixed limit before anything of that size is allocated, so that a damaged or hostile header
costs a message and no memory. Arrays do not nest (no model file does it), so nothing recurses.

Reads are plain, in chunks: pages of a mapping would stay resident, and a file cut under a mapping
would kill the process.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from slipstream.errors import LoadError

Scalar = int | float | bool | str
Value = Scalar | list[str] | npt.NDArray[np.generic]

_CHUNK_BYTES = 1 << 20  # most headers are one to eight MiB, nearly all of it vocabulary
MAX_STRING_BYTES = 1 << 24  # the longest chat templates are some 100 KB
MAX_ARRAY_LEN = 1 << 24  # the largest vocabularies have some 300,000 tokens and merges

_LENGTH = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
# GGUF's value type numbers; bool is a byte that must be 0 or 1.
_NUMBERS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


class Cursor:
    """Reads values one after the other.

    Args:
        source: the file, open for binary reading at its start.
        size: its size in bytes.
    """

    def __init__(self, source: BinaryIO, size: int) -> None:
        self._source = source
        self._size = size
        self._buffer = b""
        self._at = 0
        self._buffer_end = 0  # file offset just behind the buffer

    @property
    def offset(self) -> int:
        """File offset of the next value."""
        return self._buffer_end - len(self._buffer) + self._at

    @property
    def num_left(self) -> int:
        """Bytes between here and the end of the file."""
        return self._size - self.offset

    def take(self, num_bytes: int, what: str) -> bytes:
        """Return the next `num_bytes` bytes; `what` names them if the file ends before."""
        missing = self._at + num_bytes - len(self._buffer)
        if missing > 0:
            self._refill(num_bytes, missing, what)
        start, self._at = self._at, self._at + num_bytes
        return self._buffer[start : self._at]

    def _refill(self, num_bytes: int, missing: int, what: str) -> None:
        if num_bytes > self.num_left:
            raise LoadError(
                f"truncated: {what} at byte {self.offset} needs {num_bytes} bytes, "
                f"the file has {self.num_left} left",
                hint="fetch the file again",
            )
        more = self._source.read(max(missing, _CHUNK_BYTES))
        if len(more) < missing:
            raise LoadError(f"truncated: the file shrank while {what} was read")
        self._buffer = self._buffer[self._at :] + more
        self._buffer_end += len(more)
        self._at = 0

    def number(self, type_id: int, what: str) -> int | float:
        """Return one number of a GGUF value type."""
        form = _NUMBERS[type_id]
        value: int | float = form.unpack(self.take(form.size, what))[0]
        return value

    def u32(self, what: str) -> int:
        """Return an unsigned 32-bit integer."""
        return int(self.number(4, what))

    def u64(self, what: str) -> int:
        """Return an unsigned 64-bit integer."""
        return int(self.number(10, what))

    def count(self, what: str, *, item_bytes: int, limit: int) -> int:
        """Return a count of items of at least `item_bytes`, checked against file and limit."""
        count = self.u64(f"the number of {what}")
        if count > limit:
            raise LoadError(f"the number of {what} must be at most {limit}, got {count}")
        if count * item_bytes > self.num_left:
            raise LoadError(
                f"truncated: {count} {what} need at least {count * item_bytes} bytes, "
                f"the file has {self.num_left} left"
            )
        return count

    def string(self, what: str) -> str:
        """Return one length-prefixed UTF-8 string."""
        length = self.u64(f"the length of {what}")
        if length > MAX_STRING_BYTES:
            raise LoadError(f"{what} must have at most {MAX_STRING_BYTES} bytes, got {length}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise LoadError(f"{what} is not valid UTF-8: {error.reason}") from None

    def value(self, what: str) -> Value:
        """Return one typed value: a scalar, a list of strings or an array of numbers."""
        type_id = self.u32(f"the type of {what}")
        if type_id == _STRING:
            return self.string(what)
        if type_id == _ARRAY:
            return self._array(what)
        if type_id not in _NUMBERS:
            raise LoadError(f"the value type of {what} must be in [0, 12], got {type_id}")
        number = self.number(type_id, what)
        if type_id != _BOOL:
            return number
        if number not in (0, 1):
            raise LoadError(f"{what} is a bool and must be 0 or 1, got {number}")
        return bool(number)

    def _array(self, what: str) -> list[str] | npt.NDArray[np.generic]:
        type_id = self.u32(f"the element type of {what}")
        if type_id == _STRING:
            count = self.count(f"elements of {what}", item_bytes=_LENGTH.size, limit=MAX_ARRAY_LEN)
            return self._strings(count, f"an element of {what}")
        if type_id not in _NUMBERS:
            raise LoadError(
                f"the element type of {what} must be a number, bool or string, got {type_id}"
            )
        dtype = np.dtype(_NUMBERS[type_id].format)
        count = self.count(f"elements of {what}", item_bytes=dtype.itemsize, limit=MAX_ARRAY_LEN)
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)

    def _strings(self, count: int, what: str) -> list[str]:
        """Read an array of strings: 100,000 of them are most of the time of a whole header."""
        result: list[str] = []
        buffer, at, end = self._buffer, self._at, len(self._buffer)
        length_at, prefix = _LENGTH.unpack_from, _LENGTH.size
        try:
            for _ in range(count):
                start = at + prefix
                stop = start + length_at(buffer, at)[0] if start <= end else end + 1
                if stop <= end:
                    result.append(buffer[start:stop].decode())
                    at = stop
                    continue
                self._at = at  # the chunk ends inside this string
                result.append(self.string(what))
                buffer, at, end = self._buffer, self._at, len(self._buffer)
        except UnicodeDecodeError as error:
            raise LoadError(f"{what} is not valid UTF-8: {error.reason}") from None
        self._at = at
        return result
