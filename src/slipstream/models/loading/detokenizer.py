"""Text of a growing list of token ids, without ever showing half a character.

A token may end inside a UTF-8 sequence, and tokens may spell bytes that are no UTF-8 at all. The
stream holds back a sequence that can still be completed and replaces one that cannot by U+FFFD, so
that however the ids are split into pushes, the pieces join to the text of the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable


class Detokenizer:
    """Turns ids into text as they come; one stream each.

    Args:
        token_bytes: the bytes that an id adds to the text; none for a control token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids and return the text that became final.

        Raises:
            RequestError: an id outside the vocabulary.
        """
        return self._decoder.decode(b"".join(map(self._token_bytes, ids)))

    def finish(self) -> str:
        """End the stream: return U+FFFD for a sequence that was never completed, else ""."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
