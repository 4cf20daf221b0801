"""KV pages: who has which, and how many are left."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.errors import CapacityError
from slipstream.kernels.ops import PAGE_SIZE, KVCache


def pages_for(num_positions: int) -> int:
    """Return the pages that `num_positions` positions need; 16 need 1, 17 need 2."""
    return -(-num_positions // PAGE_SIZE)


class PagePool:
    """Hands out the pages of one KV cache, zeroed, and takes them back."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._free = list(range(kv.num_pages - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Pages that sequences have."""
        return len(self._taken)

    def allocate(self, count: int) -> list[int]:
        """Return `count` zeroed pages.

        Raises:
            CapacityError: fewer are free; none is taken then.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} KV pages are needed, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        if pages:
            self._kv.zero(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back; each must have been handed out."""
        for page in pages:
            self._taken.remove(page)
            self._free.append(page)
