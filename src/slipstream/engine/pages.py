"""KV pages: who has which, and how many are left."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.prefix import PrefixCache
from slipstream.errors import CapacityError
from slipstream.kernels.ops import PAGE_SIZE, KVCache


def pages_for(num_positions: int) -> int:
    """Return the pages that `num_positions` positions need; 16 need 1, 17 need 2."""
    return -(-num_positions // PAGE_SIZE)


class PagePool:
    """Hands out the pages of one KV cache, zeroed, and takes them back.

    A page is free, held by one sequence or more, or idle: cached and held by none. Idle pages are
    as good as free; they are given up when no other is left.

    Attributes:
        cache: the prefixes that pages hold; None keeps none.
    """

    def __init__(self, kv: KVCache, *, cache: PrefixCache | None = None) -> None:
        self._kv = kv
        self.cache = cache
        self._free = list(range(kv.num_pages - 1, -1, -1))
        self._holders: dict[int, int] = {}

    @property
    def num_pages(self) -> int:
        """All pages of the cache."""
        return self._kv.num_pages

    @property
    def num_free(self) -> int:
        """Pages that no sequence has, idle ones included."""
        return len(self._free) + (self.cache.num_idle if self.cache else 0)

    @property
    def num_taken(self) -> int:
        """Pages that sequences have; a shared one counts once."""
        return len(self._holders)

    @property
    def num_published(self) -> int:
        """Pages that entered the prefix cache so far."""
        return self.cache.num_added if self.cache else 0

    def allocate(self, count: int) -> list[int]:
        """Return `count` zeroed pages that nobody else has.

        Raises:
            CapacityError: fewer are free; none is taken then.
        """
        if count > self.num_free:
            raise CapacityError(f"{count} KV pages are needed, {self.num_free} are free")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        if pages:
            self._kv.zero(pages)
        return pages

    def share(self, page: int) -> None:
        """Hold a cached page once more."""
        if page not in self._holders:
            assert self.cache is not None
            self.cache.wake(page)
        self._holders[page] = self._holders.get(page, 0) + 1

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back, the last first; each must have been handed out."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if self.cache is not None and page in self.cache:
                self.cache.rest(page)
            else:
                self._free.append(page)

    def _evict(self) -> int:
        assert self.cache is not None
        return self.cache.evict()
