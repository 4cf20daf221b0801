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

from slipstream.engine.pages import HeldPages, PagePool, pages_for
from slipstream.engine.prefix import Ids, Node
from slipstream.kernels.ops import PAGE_SIZE, Int32

_NO_PAGES: Int32 = np.zeros(0, np.int32)


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
        self._held: HeldPages | None = None

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
        return _NO_PAGES if self._held is None else self._held.table

    def reserve(self, num_rows: int, pool: PagePool) -> None:
        """Take the pages that `num_rows` more positions need.

        Raises:
            CapacityError: the pool has not enough.
        """
        self._hold(pool).reserve(self.kv_len + num_rows)

    def extend_kv(self, num_rows: int) -> None:
        """Count the positions that a forward has written."""
        self.kv_len += num_rows
        assert pages_for(self.kv_len) <= len(self.pages), "KV written beyond the pages"

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
        if self.kv_len % PAGE_SIZE:
            return None
        return self._hold(pool).next_prefix(self.token_ids, self.prompt_len - 1)

    def adopt(self, pool: PagePool) -> None:
        """Take over cached pages that hold the next tokens of the prompt, as far as they go."""
        if not self.kv_len:
            self.num_cached = 0
        if self.next_prefix(pool) is not None:
            reached = self._hold(pool).adopt(self.token_ids, self.prompt_len - 1)
            self.num_cached += reached - self.kv_len
            self.kv_len = reached

    def publish(self, pool: PagePool) -> None:
        """Enter pages that are full and final into the cache, or share those that are there."""
        self._hold(pool).publish(self.token_ids, self.kv_len)

    def release(self) -> None:
        """Give all pages back. Safe to call twice."""
        if self._held is not None:
            self._held.release()
        self.kv_len = 0

    def _hold(self, pool: PagePool) -> HeldPages:
        """Return its pages, of the pool that it is with from the first call on."""
        if self._held is None:
            self._held = pool.hold()
        return self._held
