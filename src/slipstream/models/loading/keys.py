"""A header's keys, typed, and a record of which were looked at.

A model that loads and then babbles is worse than one that does not load. So what a family reads is
remembered, and what it did not read must be known to leave the arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from slipstream.errors import LoadError
from slipstream.models.loading.metadata import (
    LARGEST,
    SMALLEST,
    describe,
    read_bool,
    read_float,
    read_int,
    read_str,
)

# Bounds that no model reaches, so that a damaged count is named and never multiplied out.
MAX_LAYERS, MAX_WIDTH, MAX_CONTEXT = 1 << 12, 1 << 20, 1 << 30
MAX_EPS = 1.0  # of a norm: beyond it, the norm would no longer be one


class Keys:
    """Typed reads of a mapping; a key that is null counts as absent.

    Args:
        prefix: stands in front of each key, e.g. "llama.".
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._prefix = prefix
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return f"{self._prefix}{key}" in self._values

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return an integer in [low, high]; see `read_int`."""
        return read_int(self._values, self._name(key), low, high, default)

    def width(self, key: str, default: int | None = None) -> int:
        """Return a number of heads, columns or the like."""
        return self.integer(key, 1, MAX_WIDTH, default)

    def number(
        self,
        key: str,
        default: float | None = None,
        low: float = SMALLEST,
        high: float = LARGEST,
    ) -> float:
        """Return a number in [low, high]; see `read_float`."""
        return read_float(self._values, self._name(key), default, low, high)

    def cap(self, key: str) -> float:
        """Return a number above 0, or 0 where the key is absent or 0."""
        if self._values.get(self._name(key)) == 0:
            return 0.0
        return self.number(key) if key in self else 0.0

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text; see `read_str`."""
        return read_str(self._values, self._name(key), default)

    def flag(self, key: str, default: bool) -> bool:
        """Return a bool; see `read_bool`."""
        return read_bool(self._values, self._name(key), default)

    def integers(self, key: str, low: int, high: int, count: int) -> tuple[int, ...]:
        """Return `count` integers in [low, high]; one integer stands for as many equal ones."""
        value = self.raw(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biu":
            value = [int(item) for item in value]
        if not isinstance(value, list):
            return (self.integer(key, low, high),) * count
        if len(value) != count or not all(
            isinstance(item, int) and low <= item <= high for item in value
        ):
            raise LoadError(
                f"{self._prefix}{key} must be {count} integers in [{low}, {high}], "
                f"got {describe(np.array(value))}"
            )
        return tuple(value)

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Add what a family's configurations may leave out."""
        for key, value in defaults.items():
            self._values.setdefault(f"{self._prefix}{key}", value)

    def block(self, key: str) -> Keys:
        """Return the keys of an object, none where it is absent."""
        value = self._values.get(self._name(key), {})
        if not isinstance(value, Mapping):
            raise LoadError(f"{self._prefix}{key} must be an object, got {describe(value)}")
        prefix = f"{self._prefix}{key}."
        return Keys({f"{prefix}{name}": item for name, item in value.items()}, prefix)

    def raw(self, key: str) -> Any:
        """Return a value as it is, None where it is absent."""
        return self._values.get(self._name(key))

    def must(self, key: str, *allowed: object) -> None:
        """Look at a key that must be absent or one of `allowed`.

        Raises:
            LoadError: it is something else; both are named.
        """
        value = self._values.get(self._name(key))
        if value is not None and not any(_same(value, item) for item in allowed):
            raise LoadError(
                f"{self._prefix}{key} is not supported: it must be absent or "
                f"{' or '.join(repr(item) for item in allowed)}, got {describe(value)}"
            )

    def ignore(self, *keys: str) -> None:
        """Say that keys do not matter, given what was read."""
        self._read.update(keys)

    def unread(self) -> Collection[str]:
        """Return the keys that were not looked at, without the prefix."""
        start = len(self._prefix)
        return [
            key[start:]
            for key in self._values
            if key.startswith(self._prefix) and key[start:] not in self._read
        ]

    def refuse_unread(self, what: str) -> None:
        """Refuse keys that were not looked at.

        Raises:
            LoadError: there is one; it is named.
        """
        for key in self.unread():
            raise LoadError(
                f"{self._prefix}{key} is not known of {what}: it must be absent or null, got "
                f"{describe(self.raw(key))}"
            )

    def _name(self, key: str) -> str:
        self._read.add(key)
        return f"{self._prefix}{key}"


def _same(value: object, item: object) -> bool:
    """Return whether two values are equal, true not counting as 1."""
    if isinstance(value, bool) or isinstance(item, bool):
        return value is item
    return bool(value == item)
