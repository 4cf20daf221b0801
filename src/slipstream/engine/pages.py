"""KV pages: who has which, how many are left, and which of them sequences share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.engine.prefix import Ids, Node, PrefixCache
from slipstream.errors import CapacityError
from slipstream.kernels.ops import PAGE_SIZE, Int32, KVCache


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

    def hold(self, *, shares: bool = True) -> HeldPages:
        """Return the pages of a new sequence, none yet.

        Args:
            shares: False has it take nothing from the prefix cache and leave nothing there.
        """
        return HeldPages(self, self.cache if shares else None)

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


class HeldPages:
    """The pages of one sequence, in order of position.

    With a prefix cache, pages that are full and final are open to others: `publish` enters them and
    `adopt` finds those of others. Nobody writes to a page again once it is published, so whoever
    holds pages tells these methods of positions that stay as they are, and of no others.

    Attributes:
        table: int32 of shape (P,).
    """

    def __init__(self, pool: PagePool, cache: PrefixCache | None) -> None:
        self._pool, self._cache = pool, cache
        self.table: Int32 = np.zeros(0, np.int32)
        self._pages: list[int] = []
        self._published: list[Node] = []  # the first pages, as the cache has them

    def __len__(self) -> int:
        return len(self._pages)

    def missing(self, num_positions: int) -> int:
        """Return how many more pages so many positions need."""
        return max(0, pages_for(num_positions) - len(self._pages))

    def reserve(self, num_positions: int) -> None:
        """Take the pages that so many positions need.

        Raises:
            CapacityError: the pool has not enough; none is taken then.
        """
        if missing := self.missing(num_positions):
            self._pages += self._pool.allocate(missing)
            self.table = np.array(self._pages, np.int32)

    def next_prefix(self, token_ids: Sequence[int], limit: int) -> tuple[Node, Ids] | None:
        """Return where the cache has, or will have, the page behind the published ones.

        None without a cache, and for a page that does not end within `limit` positions.
        """
        start = len(self._published) * PAGE_SIZE
        if self._cache is None or start + PAGE_SIZE > limit:
            return None
        parent = self._published[-1] if start else self._cache.root
        return parent, tuple(token_ids[start : start + PAGE_SIZE])

    def adopt(self, token_ids: Sequence[int], limit: int) -> int:
        """Take over cached pages of the text within `limit` positions, as far as they go.

        They take the places of pages that are held and not published.

        Returns:
            The positions of pages that are published now, from the first.
        """
        while (prefix := self.next_prefix(token_ids, limit)) is not None:
            parent, ids = prefix
            if (node := parent.children.get(ids)) is None:
                break
            self._take(node)
        if len(self.table) < len(self._pages):
            self.table = np.array(self._pages, np.int32)
        return len(self._published) * PAGE_SIZE

    def publish(self, token_ids: Sequence[int], limit: int) -> None:
        """Enter pages of the text that end within `limit` positions, all written, into the cache.

        Where another sequence published the same tokens first, its page takes the place of ours:
        the bytes are equal, and whoever holds a page holds all pages before it.
        """
        while (prefix := self.next_prefix(token_ids, limit)) is not None:
            parent, ids = prefix
            node = parent.children.get(ids)
            if node is not None:
                self._take(node)
            elif self._cache is not None:
                page = self._pages[len(self._published)]
                self._published.append(self._cache.add(parent, ids, page))

    def release(self) -> None:
        """Give all pages back. Safe to call twice."""
        self._pool.free(self._pages)
        self._pages, self._published = [], []
        self.table = np.zeros(0, np.int32)

    def _take(self, node: Node) -> None:
        """Hold a cached page behind the published ones."""
        index = len(self._published)
        self._pool.share(node.page)
        if index < len(self._pages):
            self._pool.free([self._pages[index]])
            self._pages[index] = self.table[index] = node.page
        else:
            self._pages.append(node.page)
        self._published.append(node)
