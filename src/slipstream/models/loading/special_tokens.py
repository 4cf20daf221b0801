"""Finding special tokens in a text before anything else looks at it.

Tokens that a vocabulary calls user-defined are parts of ordinary text and always found; control
tokens only where the caller allows them. They are found here rather than by the `tokenizers`
library, so that one object serves both kinds of text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence


class SpecialTokens:
    """Cuts texts at special tokens.

    Args:
        texts: the vocabulary.
        user_defined: ids that are always found; an empty text never is.
        control: ids that are found where they are allowed.
    """

    def __init__(
        self, texts: Sequence[str], user_defined: Iterable[int], control: Iterable[int]
    ) -> None:
        always = {texts[index]: index for index in user_defined if texts[index]}
        allowed = {texts[index]: index for index in control if texts[index]}
        self._ids = always | allowed
        self._always = _alternation(always)
        self._all = _alternation(self._ids)

    def cut(self, text: str, *, parse_special: bool) -> Iterator[int | str]:
        """Yield the pieces of a text in turn: a special token's id, or text that holds none."""
        pattern = self._all if parse_special else self._always
        # An alternation in one group: re.split returns text and special tokens in turn.
        pieces = pattern.split(text) if pattern else [text]
        for index, piece in enumerate(pieces):
            if index % 2:
                yield self._ids[piece]
            elif piece:
                yield piece


def _alternation(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern of one group that matches any of the texts, the longest first."""
    spelled = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, spelled))})") if spelled else None
