"""One sequence: its tokens, how many of them the target's KV holds, and in which pages.

Token ids are committed for good. KV runs behind: while decoding it holds all tokens but the last,
the anchor. A verify writes KV for its drafts as well; `commit` rolls the length back to what was
kept. The pages stay, their stale positions are written again before anything reads them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slipstream.engine.pages import PagePool, pages_for
from slipstream.kernels.ops import Int32


class TokenSequence:
    """Tokens and KV pages of one sequence.

    Attributes:
        token_ids: prompt and output; grows at its end only.
        prompt_len: how many of them are the prompt.
        kv_len: positions whose KV is written and kept.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self.token_ids = list(prompt_ids)
        self.prompt_len = len(self.token_ids)
        self.kv_len = 0
        self._pages: list[int] = []
        self._table: Int32 = np.zeros(0, np.int32)

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

    def release(self, pool: PagePool) -> None:
        """Give all pages back. Safe to call twice."""
        pool.free(self._pages)
        self._pages = []
        self._table = np.zeros(0, np.int32)
        self.kv_len = 0
