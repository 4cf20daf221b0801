"""SentencePiece's BPE: a score for each token, "▁" for a space, bytes where no token fits.

Of all neighbours whose join is a token, those with the best score are joined first, the leftmost
among equals, over the whole text: nothing cuts words. The library merges by rank, so every way to
join two tokens to a third becomes a merge, ranked by the third's score. Joins to a control token
are left out, so that no text spells one.

Source: Kudo and Richardson 2018, arXiv 1808.06226; the order of joins as in llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from slipstream.errors import LoadError
from slipstream.models.loading.merger import Merger

SPACE = "▁"
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_BYTE_OF = {text: byte for byte, text in enumerate(BYTES)}
_LINES = re.compile("(\n+)")
_MIN_DISTINCT = 0.9  # of tokens that joins make; converters without scores write one for all


def require_bytes(ids: Mapping[str, int]) -> None:
    """Check that every byte has a token.

    Raises:
        LoadError: one has none, so some texts would have no ids.
    """
    missing = [text for text in BYTES if text not in ids]
    if missing:
        raise LoadError(f"the vocabulary must have a token for every byte, {missing[0]} is missing")


def spelled_piece(text: str, *, is_byte: bool) -> bytes:
    """Return the bytes that a token spells; e.g. "▁hi" gives b" hi", the byte "<0x0A>" b"\\n"."""
    if is_byte and text in _BYTE_OF:
        return bytes([_BYTE_OF[text]])
    return text.replace(SPACE, " ").encode()


class PieceMerger:
    """Merges texts with a scored vocabulary.

    Args:
        ids: id of each token's text.
        scores: of shape (V,).
        never: ids that no joining of text may give.
        prefix: put a space in front of text that begins or follows a special token.

    Raises:
        LoadError: scores are not finite, or do not say which of two joins goes first.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        scores: npt.NDArray[np.float64],
        *,
        never: Collection[int],
        prefix: bool,
    ) -> None:
        if not np.isfinite(scores).all():
            raise LoadError("the scores of tokens must be finite")
        self._prefix = SPACE if prefix else ""
        tokens = {text: index for text, index in ids.items() if index not in never}
        joined = [index for text, index in tokens.items() if len(text) > 1]
        distinct = len(np.unique(scores[joined]))
        if distinct < _MIN_DISTINCT * len(joined):
            raise LoadError(
                f"the scores of tokens must order them, got {distinct} scores for {len(joined)}",
                hint="convert the model again, from its tokenizer.model",
            )
        chars = sorted(set[str]().union(*tokens) - tokens.keys())
        stand_ins = {char: [ids[BYTES[byte]] for byte in char.encode()] for char in chars}
        merges = ranked_merges(tokens, tokens.keys() | set(chars), scores)
        self._merger = Merger(ids, merges, stand_ins=stand_ins, byte_fallback=True)

    def encode(self, text: str, first: bool) -> list[int]:
        """Return the ids of text without special tokens; `first` as `prefix` means it."""
        return self._merger.encode((self._prefix if first else "") + text.replace(" ", SPACE))


class LineMerger:
    """Merges texts whose vocabulary has merges, spaces written "▁" and no cuts but at line ends.

    Line ends that are one token together are that token, whatever merging would give.
    """

    def __init__(self, ids: Mapping[str, int], merges: Iterable[tuple[str, str]]) -> None:
        self._ids = ids
        self._merger = Merger(ids, merges, stand_ins={}, byte_fallback=True)

    def encode(self, text: str) -> list[int]:
        """Return the ids of text without special tokens."""
        ids: list[int] = []
        for piece in _LINES.split(text.replace(" ", SPACE)):
            if piece.startswith("\n") and piece in self._ids:
                ids.append(self._ids[piece])
            elif piece:
                ids += self._merger.encode(piece)
        return ids


def ranked_merges(
    tokens: Mapping[str, int], parts: Collection[str], scores: npt.NDArray[np.float64]
) -> list[tuple[str, str]]:
    """Return every way to join two parts to a token, those of the best scores first.

    Equal scores go by id, where llama.cpp takes the leftmost join: Mistral's vocabulary has
    fourteen such tokens, and none of 2,000 random texts led to two of them side by side.
    """
    texts = {index: text for text, index in tokens.items()}
    ordered = [texts[i] for i in np.argsort(-scores, kind="stable").tolist() if i in texts]
    return [
        (text[:at], text[at:])
        for text in ordered
        for at in range(1, len(text))
        if text[:at] in parts and text[at:] in parts
    ]
