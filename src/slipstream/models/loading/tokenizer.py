"""The tokenizer of a GGUF file: byte-level BPE with the file's own vocabulary and merges.

Text is cut at special tokens first (if the caller allows them), then by the pre-tokenizer's rule,
then merged by the `tokenizers` library. Special tokens are found here rather than there, so that
one object serves both prompts that may contain them and text that must not: a user's message that
spells "<|im_end|>" is parsed as a special token only inside a rendered chat prompt.

Rules: `ByteLevel` and `Digits` of the `tokenizers` documentation for "gpt-2" and "smollm"; the four
expressions of llama.cpp's fallback for "default". Other kinds (SentencePiece, WordPiece, Unigram)
and other pre-tokenizers are refused by name: a near match would give plausible, wrong ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np
from tokenizers import Regex
from tokenizers import Tokenizer as Merger
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from slipstream.errors import LoadError, RequestError
from slipstream.models.loading.bytes_map import spelled_bytes
from slipstream.models.loading.detokenizer import Detokenizer
from slipstream.models.loading.metadata import (
    Metadata,
    describe,
    read_bool,
    read_int,
    read_str,
    read_texts,
)

_PREFIX = "tokenizer.ggml."
# GGUF's token types; the rest (normal, unknown, byte) need no treatment here.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_OTHER_STOP_KEYS = ("eot_token_id", "eom_token_id")

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT_RULES = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _default() -> PreTokenizer:
    cuts = [Split(Regex(rule), behavior="isolated") for rule in _DEFAULT_RULES]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "default": _default,
    "gpt-2": _gpt2,
    "smollm": _smollm,
}


class Tokenizer:
    """Text to ids and back. Immutable once built, so threads may share it.

    Args:
        metadata: a GGUF header's metadata.

    Attributes:
        vocab_size: V; ids are in [0, V).
        bos_id: the id that begins a text, or None.
        eos_id: the id that ends one, or None.
        stop_ids: ids that end a reply: end of sequence, of turn, of message.
        adds_bos: whether `encode` puts `bos_id` in front.
        control_ids: ids that add nothing to a text.
        unused_ids: ids that the file says no text uses.

    Raises:
        LoadError: a kind of tokenizer that is not supported, or inconsistent metadata.
    """

    def __init__(self, metadata: Metadata) -> None:
        kind = read_str(metadata, f"{_PREFIX}model")
        if kind != "gpt2":
            raise LoadError(f"tokenizer must be gpt2 (byte-level BPE), got {describe(kind)}")
        pre = read_str(metadata, f"{_PREFIX}pre", "default")
        if pre not in PRE_TOKENIZERS:
            raise LoadError(
                f"pre-tokenizer must be one of {', '.join(PRE_TOKENIZERS)}, got {describe(pre)}"
            )
        self._texts = read_texts(metadata, f"{_PREFIX}tokens")
        self._types = _token_types(metadata, len(self._texts))
        self._ids = _vocabulary(self._texts)
        self._merger = Merger(_merges(metadata, self._ids))
        self._merger.pre_tokenizer = PRE_TOKENIZERS[pre]()
        self.control_ids = self._ids_of_type(_CONTROL)
        self.unused_ids = self._ids_of_type(_UNUSED)
        self._user_defined = self._ids_of_type(_USER_DEFINED)
        self._any_special = _alternation(self._texts, self.control_ids | self._user_defined)
        self._always_special = _alternation(self._texts, self._user_defined)
        self.vocab_size = len(self._texts)
        self.bos_id = self._read_id(metadata, "bos_token_id")
        self.adds_bos = read_bool(metadata, f"{_PREFIX}add_bos_token", False)
        if self.adds_bos and self.bos_id is None:
            raise LoadError(f"{_PREFIX}add_bos_token is set, but there is no bos_token_id")
        self.eos_id = self._read_id(metadata, "eos_token_id")
        stops = {self.eos_id, *(self._read_id(metadata, key) for key in _OTHER_STOP_KEYS)}
        self.stop_ids = frozenset(stop for stop in stops if stop is not None)
        if not self.stop_ids:
            raise LoadError(f"{_PREFIX}eos_token_id is missing: no reply would end")

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
        ids: list[int] = []
        pattern = self._any_special if parse_special else self._always_special
        # An alternation in one group: re.split returns text and special tokens in turn.
        pieces = pattern.split(text) if pattern else [text]
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids += self._merger.encode(piece, add_special_tokens=False).ids
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

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
        if token_id in self.control_ids:
            return b""
        text = self._texts[token_id]
        return text.encode() if token_id in self._user_defined else spelled_bytes(text)

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it, e.g. "<|im_end|>" or "Ġhello".

        Raises:
            RequestError: an id outside the vocabulary.
        """
        self.token_bytes(token_id)  # for its check
        return self._texts[token_id]

    @property
    def vocabulary(self) -> list[str]:
        """Tokens as the vocabulary spells them, in order of their ids."""
        return self._texts

    def detokenizer(self) -> Detokenizer:
        """Return a new stream that turns ids into text as they come."""
        return Detokenizer(self.token_bytes)

    def _ids_of_type(self, wanted: int) -> frozenset[int]:
        found = np.flatnonzero(self._types == wanted).tolist()
        return frozenset(index for index in found if self._texts[index])

    def _read_id(self, metadata: Metadata, key: str) -> int | None:
        if f"{_PREFIX}{key}" not in metadata:
            return None
        return read_int(metadata, f"{_PREFIX}{key}", 0, self.vocab_size - 1)


def _token_types(metadata: Metadata, num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    value = metadata.get(f"{_PREFIX}token_type")
    if value is None:
        return np.ones(num_tokens, np.int64)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        raise LoadError(f"{_PREFIX}token_type must be an array of integers, got {describe(value)}")
    if value.size != num_tokens:
        raise LoadError(f"{_PREFIX}token_type has {value.size} entries for {num_tokens} tokens")
    return value.astype(np.int64)


def _vocabulary(texts: list[str]) -> dict[str, int]:
    ids = {text: index for index, text in enumerate(texts)}
    if not texts or len(ids) != len(texts):
        twice = next((t for i, t in enumerate(texts) if ids[t] != i), None)
        problem = "is empty" if twice is None else f"has the token {describe(twice)} twice"
        raise LoadError(f"{_PREFIX}tokens {problem}")
    return ids


def _merges(metadata: Metadata, ids: dict[str, int]) -> BPE:
    """Build the merge model; the library checks that parts and results are in the vocabulary."""
    pairs: list[tuple[str, str]] = []
    for line in read_texts(metadata, f"{_PREFIX}merges"):
        left, _, right = line.partition(" ")
        pairs.append((left, right))
    try:
        return BPE(vocab=ids, merges=pairs)
    except Exception as error:  # the library raises nothing more specific
        raise LoadError(f"{_PREFIX}merges do not fit the vocabulary: {error}") from error


def _alternation(texts: list[str], ids: frozenset[int]) -> re.Pattern[str] | None:
    """Return a pattern of one group that matches any of the tokens, the longest first."""
    if not ids:
        return None
    spelled = sorted((texts[index] for index in ids), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, spelled))})")
