"""What precedes a row: prompt, committed tokens and the drafts before it, with counts.

Row j of a verify follows the committed tokens and the first j drafts, so a history is pushed and
popped token by token; counts follow, and nothing is recounted per row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slipstream.engine.matcher import Bool, Matcher
from slipstream.kernels.ops import Int32


class TokenCounts:
    """How often each id was pushed, and which ids were, in order of their first push.

    Attributes:
        counts: int32 of shape (V,).
    """

    def __init__(self, vocab_size: int) -> None:
        self.counts: Int32 = np.zeros(vocab_size, np.int32)
        self._distinct: Int32 = np.zeros(vocab_size, np.int32)
        self._num_distinct = 0

    @property
    def distinct(self) -> Int32:
        """The ids that were pushed, int32 of shape (N,); a view."""
        return self._distinct[: self._num_distinct]

    def push(self, token_id: int) -> None:
        """Count a token."""
        if self.counts[token_id] == 0:
            self._distinct[self._num_distinct] = token_id
            self._num_distinct += 1
        self.counts[token_id] += 1

    def pop(self, token_id: int) -> None:
        """Take back the last push, which was of this token."""
        self.counts[token_id] -= 1
        if self.counts[token_id] == 0:
            self._num_distinct -= 1


class RowHistory:
    """The tokens before a row.

    Args:
        prompt_ids: the prompt.
        vocab_size: count tokens below this; None keeps no counts.
        matcher: where the output stands in its grammar, None without one; moves along.

    Attributes:
        token_ids: prompt and output; to be changed by `push` and `pop` only.
        prompt_len: how many of them are the prompt.
        seen: counts over prompt and output, None without counts.
        output: counts over the output, None without counts.
    """

    def __init__(
        self,
        prompt_ids: Iterable[int],
        *,
        vocab_size: int | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.matcher = matcher
        self.token_ids = list(prompt_ids)
        self.prompt_len = len(self.token_ids)
        self.seen = self.output = None
        if vocab_size is not None:
            self.seen, self.output = TokenCounts(vocab_size), TokenCounts(vocab_size)
            for token_id in self.token_ids:
                self.seen.push(token_id)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_outputs(self) -> int:
        """Tokens beyond the prompt."""
        return len(self.token_ids) - self.prompt_len

    @property
    def allowed(self) -> Bool | None:
        """The grammar's mask of what may follow, bool of shape (V,); None allows all."""
        return None if self.matcher is None else self.matcher.allowed()

    def surely_allows(self, token_id: int) -> bool:
        """Return whether a grammar is known to allow a token here, without computing its mask."""
        return self.matcher is not None and self.matcher.surely_allows(token_id)

    @property
    def must_stop(self) -> bool:
        """Whether a grammar is complete and allows nothing but stop ids."""
        return self.matcher is not None and self.matcher.must_stop

    def push(self, token_id: int) -> None:
        """Append an output token."""
        self.token_ids.append(token_id)
        if self.matcher is not None:
            self.matcher.push(token_id)
        if self.seen is not None and self.output is not None:
            self.seen.push(token_id)
            self.output.push(token_id)

    def pop(self) -> int:
        """Take the last output token back and return it."""
        assert self.num_outputs > 0, "a prompt is not popped"
        token_id = self.token_ids.pop()
        if self.matcher is not None:
            self.matcher.pop()
        if self.seen is not None and self.output is not None:
            self.seen.pop(token_id)
            self.output.pop(token_id)
        return token_id

    def truncate(self, length: int) -> None:
        """Take output tokens back until `length` tokens are left."""
        while len(self.token_ids) > length:
            self.pop()

    def ends_in(self, token_ids: tuple[int, ...]) -> bool:
        """Return whether the last tokens are these."""
        start = len(self.token_ids) - len(token_ids)
        return start >= 0 and tuple(self.token_ids[start:]) == token_ids
