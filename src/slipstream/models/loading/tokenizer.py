"""Text to token ids and back, whatever file the vocabulary came from.

A `Tokenizer` joins what the readers found (`gguf_tokenizer.py`, `json_tokenizer.py`): a way to
encode text, the bytes that each id adds to a text, and the ids that begin and end one. Those bytes
do not depend on an id's neighbours, so a stream of ids needs no more state than half a character,
and a text in a SentencePiece vocabulary keeps the space that encoding put in front of it.

Encoding is told whether special tokens may be found: a user's message that spells "<|im_end|>" is
parsed as a special token only inside a rendered chat prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from slipstream.errors import RequestError
from slipstream.models.loading.detokenizer import Detokenizer
from slipstream.models.loading.reach import Reach

# Control tokens that end a turn or message, in models whose files name one end where they have two.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens.

    Attributes:
        texts: each token as the file spells it, by id.
        control_ids: ids that add nothing to a text.
        spell: maps any other id to the bytes that it adds.
        unused_ids: ids that the file says no text uses.
    """

    texts: Sequence[str]
    control_ids: frozenset[int]
    spell: Callable[[int], bytes]
    unused_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The ids that begin and end texts.

    Attributes:
        bos_id: the id that begins a text, or None.
        adds_bos: whether encoding puts `bos_id` in front.
        eos_id: the id that ends one, or None.
        stop_ids: ids that end a reply: end of sequence, of turn, of message.
    """

    bos_id: int | None
    adds_bos: bool
    eos_id: int | None
    stop_ids: frozenset[int]


class Tokenizer:
    """Text to ids and back. Immutable once built, so threads may share it.

    Args:
        vocabulary: the tokens.
        ends: the ids that begin and end texts.
        encode_text: maps a text and whether control tokens spelled in it become their ids to the
            ids, without `bos_id` in front.
        reach: says how much text one id stands for at most, None where nothing is known of it;
            asked when the first long text comes.

    Attributes:
        vocab_size: V; ids are in [0, V).
        bos_id, adds_bos, eos_id, stop_ids: see `Ends`.
        control_ids: ids that add nothing to a text.
        unused_ids: ids that the file says no text uses.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        ends: Ends,
        encode_text: Callable[[str, bool], list[int]],
        reach: Callable[[], Reach | None] = lambda: None,
    ) -> None:
        self._find_reach = reach
        self._texts = vocabulary.texts
        self._spell = vocabulary.spell
        self._encode_text = encode_text
        self.control_ids = vocabulary.control_ids
        self.unused_ids = vocabulary.unused_ids
        self.vocab_size = len(vocabulary.texts)
        self.bos_id = ends.bos_id
        self.adds_bos = ends.adds_bos
        self.eos_id = ends.eos_id
        self.stop_ids = ends.stop_ids

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the ids of a text, a beginning-of-text id in front if the model asks for one.

        Args:
            text: any text without lone surrogates.
            parse_special: whether control tokens spelled in the text become their ids; True for a
                rendered chat prompt, False for text from outside. Tokens that the vocabulary calls
                user-defined are parts of ordinary text and always become their ids.

        A byte that the vocabulary does not spell is left out: SmolLM2's lacks six control
        characters and fifteen bytes that no assigned character needs.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text must be valid Unicode, got a lone surrogate at {error.start}",
                code="invalid_text",
            ) from None
        ids = self._encode_text(text, parse_special)
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def has_more_ids(self, text: str, limit: int) -> int:
        """Tell, before a text is encoded, whether it has more than so many ids.

        Returns:
            A number of ids that it has at least, beyond `limit`; 0 where that is not certain.
        """
        if 4 * len(text) <= limit:  # no character has more than four bytes
            return 0
        fewest = 0 if self._reach is None else self._reach.fewest_ids(text)
        return fewest if fewest > limit else 0

    @cached_property
    def _reach(self) -> Reach | None:
        return self._find_reach()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, control tokens left out, invalid UTF-8 as U+FFFD.

        Raises:
            RequestError: an id outside the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; none for a control token.

        Raises:
            RequestError: an id outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"token id must be in [0, {self.vocab_size - 1}], got {token_id}",
                code="invalid_token_id",
            )
        return b"" if token_id in self.control_ids else self._spell(token_id)

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it, e.g. "<|im_end|>" or "Ġhello".

        Raises:
            RequestError: an id outside the vocabulary.
        """
        self.token_bytes(token_id)  # for its check
        return self._texts[token_id]

    @property
    def vocabulary(self) -> Sequence[str]:
        """Tokens as the vocabulary spells them, in order of their ids."""
        return self._texts

    def detokenizer(self) -> Detokenizer:
        """Return a new stream that turns ids into text as they come."""
        return Detokenizer(self.token_bytes)
