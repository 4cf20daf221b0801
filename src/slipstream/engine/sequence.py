"""One sequence: its tokens, how many of them the target's KV holds, and in which pages.

Token ids are committed for good. KV runs behind: while decoding it holds all tokens but the last,
the anchor. A verify writes KV for its drafts as well; `commit` rolls the length back to what was
kept. The pages stay, their stale positions are written again before anything reads them.

With a prefix cache, a page whose 16 positions are all below `kv_len` is published: it is never
written again, since a forward writes at `kv_len` and beyond, so others may read it. Rejected drafts
lie beyond `kv_len` and never get in.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slipstream.engine.pages import PagePool, pages_for
from slipstream.engine.prefix import Ids, Node
from slipstream.kernels.ops import PAGE_SIZE, Int32


class TokenSequence:
    """Tokens and KV pages of one sequence.

    Attributes:
        token_ids: prompt and output; grows at its end only.
        prompt_len: how many of them are the prompt.
        kv_len: positions whose KV is written and kept.
        num_cached: prompt tokens whose KV came from the prefix cache.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self.token_ids = list(prompt_ids)
        self.prompt_len = len(self.token_ids)
        self.kv_len = 0
        self.num_cached = 0
        self._pages: list[int] = []
        self._table: Int32 = np.zeros(0, np.int32)
        self._published: list[Node] = []  # the first pages, as the cache has them

    @property
    def num_generated(self) -> int:
        """Tokens beyond the prompt."""
        return len(self.token_ids) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        """Tokens beyond the prompt, copied."""
        return self.token_ids[self.prompt_len :]

    @property
    def pages(self) -> Int32:
        """Pages in order of position, int32 of shape (P,)."""
        return self._table

    def reserve(self, num_rows: int, pool: PagePool) -> None:
        """Take the pages that `num_rows` more positions need.

        Raises:
            CapacityError: the pool has not enough.
        """
        missing = pages_for(self.kv_len + num_rows) - len(self._pages)
        if missing > 0:
            self._pages += pool.allocate(missing)
            self._table = np.array(self._pages, np.int32)

    def extend_kv(self, num_rows: int) -> None:
        """Count the positions that a forward has written."""
        self.kv_len += num_rows
        assert pages_for(self.kv_len) <= len(self._pages), "KV written beyond the pages"

    def commit(self, emitted: list[int]) -> None:
        """Append what a forward emitted and roll KV back to all tokens but the last."""
        self.token_ids += emitted
        assert self.kv_len >= len(self.token_ids) - 1, "a committed token has no KV"
        self.kv_len = len(self.token_ids) - 1

    def next_prefix(self, pool: PagePool) -> tuple[Node, Ids] | None:
        """Return where the cache has, or will have, the page that prefill comes to next.

        None between pages, without a cache, and on the page of the prompt's last token, which is
        always computed: its logits are wanted.
        """
        start = self.kv_len
        if pool.cache is None or start % PAGE_SIZE or start + PAGE_SIZE >= self.prompt_len:
            return None
        parent = self._published[-1] if self._published else pool.cache.root
        return parent, tuple(self.token_ids[start : start + PAGE_SIZE])

    def adopt(self, pool: PagePool) -> None:
        """Take over cached pages that hold the next tokens of the prompt, as far as they go."""
        before = self.kv_len
        if not before:
            self.num_cached = 0
        while (prefix := self.next_prefix(pool)) is not None:
            parent, ids = prefix
            node = parent.children.get(ids)
            if node is None:
                break
            pool.share(node.page)
            self._pages.append(node.page)
            self._published.append(node)
            self.kv_len += PAGE_SIZE
        if self.kv_len > before:
            self.num_cached += self.kv_len - before
            self._table = np.array(self._pages, np.int32)

    def publish(self, pool: PagePool) -> None:
        """Enter pages that are full and final into the cache.

        Where another sequence published the same tokens first, its page takes the place of ours:
        the bytes are equal, and whoever holds a page holds all pages before it.
        """
        cache = pool.cache
        while cache is not None and (len(self._published) + 1) * PAGE_SIZE <= self.kv_len:
            index = len(self._published)
            ids = tuple(self.token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            parent = self._published[-1] if index else cache.root
            node, own = parent.children.get(ids), self._pages[index]
            if node is None:
                node = cache.add(parent, ids, own)
            else:
                pool.share(node.page)
                pool.free([own])
                self._pages[index] = self._table[index] = node.page
            self._published.append(node)

    def release(self, pool: PagePool) -> None:
        """Give all pages back. Safe to call twice."""
        pool.free(self._pages)
        self._pages = []
        self._published = []
        self._table = np.zeros(0, np.int32)
        self.kv_len = 0
