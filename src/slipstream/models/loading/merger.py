"""BPE merging by the `tokenizers` library, and what it cannot say itself.

A character may be part of tokens without being one. The library would drop it, or turn it to
bytes, before merging, and so let its neighbours merge with each other. Here it stands in the merge
under an id beyond the vocabulary and is replaced, if it is still there, afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Tokenizer as Library
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from slipstream.errors import LoadError


class Merger:
    """Merges texts.

    Args:
        ids: id of each token's text; they are 0 to V - 1.
        merges: pairs of texts, the first to be merged first; of a pair that comes twice the first
            place counts.
        stand_ins: characters that are no tokens, with the ids that replace them in the end.
        pre_tokenizer: what cuts words and spells bytes; None merges over the whole text.
        ignore_merges, byte_fallback: see the library.

    Raises:
        LoadError: a merge whose parts or result are not in the vocabulary.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        merges: Iterable[tuple[str, str]],
        *,
        stand_ins: Mapping[str, Sequence[int]],
        pre_tokenizer: PreTokenizer | None = None,
        ignore_merges: bool = False,
        byte_fallback: bool = False,
    ) -> None:
        self._size = len(ids)
        extra = {text: self._size + place for place, text in enumerate(stand_ins)}
        self._replaced = {extra[text]: tuple(found) for text, found in stand_ins.items()}
        try:
            model = BPE(
                vocab={**ids, **extra},
                merges=list(dict.fromkeys(merges)),
                ignore_merges=ignore_merges,
                byte_fallback=byte_fallback,
            )
        except Exception as error:  # the library raises nothing more specific
            raise LoadError(f"merges do not fit the vocabulary: {error}") from error
        self._library = Library(model)
        if pre_tokenizer is not None:
            self._library.pre_tokenizer = pre_tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of text without special tokens."""
        ids = self._library.encode(text, add_special_tokens=False).ids
        if not self._replaced or max(ids, default=0) < self._size:
            return ids
        return [part for index in ids for part in self._replaced.get(index, (index,))]
