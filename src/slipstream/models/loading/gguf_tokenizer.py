"""The tokenizer of a GGUF file, of one of three kinds (`tokenizer.ggml.model`).

- "gpt2": byte-level BPE with the file's vocabulary and merges; `tokenizer.ggml.pre` names the rule
  that cuts words (`pre_tokenizers.py`).
- "llama": SentencePiece BPE with scores (`sentence_piece.py`).
- "gemma4": BPE with merges over text whose spaces are written "▁", with bytes to fall back on.

Text is cut at special tokens first, then merged. Other kinds (WordPiece, Unigram) and other
pre-tokenizers are refused by name: a near match would give plausible, wrong ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from slipstream.errors import LoadError
from slipstream.models.loading.bytes_map import BYTE_OF, spelled_bytes
from slipstream.models.loading.merger import Merger
from slipstream.models.loading.metadata import (
    Metadata,
    describe,
    read_bool,
    read_int,
    read_str,
    read_texts,
)
from slipstream.models.loading.pre_tokenizers import PRE_TOKENIZERS
from slipstream.models.loading.reach import (
    Reach,
    byte_level_bytes,
    piece_bytes,
    unspelled_bytes,
)
from slipstream.models.loading.sentence_piece import (
    LineMerger,
    PieceMerger,
    require_bytes,
    spelled_piece,
)
from slipstream.models.loading.special_tokens import SpecialTokens
from slipstream.models.loading.tokenizer import TURN_ENDS, Ends, Tokenizer, Vocabulary

KINDS = ("gpt2", "llama", "gemma4")
_PREFIX = "tokenizer.ggml."
# GGUF's token types; the rest (normal, unused) need no treatment here.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_OTHER_STOP_KEYS = ("eot_token_id", "eom_token_id")


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What the kinds differ in.

    Attributes:
        merge: maps text without special tokens, and whether it begins the text or follows a special
            token, to ids.
        spell: maps a normal or byte token's id to its bytes.
        stands_for: maps a token's text to the bytes of text that it stands for at most.
        dropped: bytes of text that merging may leave out.
        adds_bos, bos_id, eos_id: the kind's defaults.
    """

    merge: Callable[[str, bool], list[int]]
    spell: Callable[[int], bytes]
    adds_bos: bool
    stands_for: Callable[[str], int] = piece_bytes
    dropped: bytes = b""
    bos_id: int | None = None
    eos_id: int | None = None


class _Tokens:
    """The tokens of a file: texts, ids by text, ids by type."""

    def __init__(self, metadata: Metadata) -> None:
        self.texts = read_texts(metadata, f"{_PREFIX}tokens")
        self._types = _read_types(metadata, len(self.texts))
        self.ids = _ids_by_text(self.texts)

    def of_type(self, wanted: int) -> frozenset[int]:
        found = np.flatnonzero(self._types == wanted).tolist()
        return frozenset(index for index in found if self.texts[index])


def read_tokenizer(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer that a GGUF header's metadata describe.

    Raises:
        LoadError: a kind of tokenizer that is not supported, or inconsistent metadata.
    """
    name = read_str(metadata, f"{_PREFIX}model")
    if name not in KINDS:
        raise LoadError(
            f"tokenizer must be one of {', '.join(KINDS)} (forms of BPE), got {describe(name)}"
        )
    tokens = _Tokens(metadata)
    pre = "gemma4" if name == "gemma4" else read_str(metadata, f"{_PREFIX}pre", "default")
    if name == "llama":
        kind = _sentence_piece(metadata, tokens)
    elif pre == "gemma4":
        kind = _gemma4(metadata, tokens)
    else:
        kind = _byte_level(metadata, tokens, pre)
    user_defined = tokens.of_type(_USER_DEFINED)
    control = tokens.of_type(_CONTROL) | tokens.of_type(_UNKNOWN)
    special = SpecialTokens(tokens.texts, user_defined, control)

    def spell(index: int) -> bytes:
        return tokens.texts[index].encode() if index in user_defined else kind.spell(index)

    def encode(text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        first = True  # at the beginning, or behind a special token
        for piece in special.cut(text, parse_special=parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += kind.merge(piece, first)
            first = isinstance(piece, int)
        return ids

    def reach() -> Reach:
        special_bytes = [piece_bytes(tokens.texts[index]) for index in user_defined | control]
        longest = max([1, *map(kind.stands_for, tokens.texts), *special_bytes])
        return Reach(longest=longest, dropped=kind.dropped)

    vocabulary = Vocabulary(
        texts=tokens.texts,
        control_ids=control,
        spell=spell,
        unused_ids=frozenset(tokens.of_type(_UNUSED)),
    )
    return Tokenizer(vocabulary, _read_ends(metadata, tokens, kind), encode, reach)


def _byte_level(metadata: Metadata, tokens: _Tokens, pre: str) -> _Kind:
    if pre not in PRE_TOKENIZERS:
        raise LoadError(
            f"pre-tokenizer must be one of {', '.join(PRE_TOKENIZERS)}, got {describe(pre)}"
        )
    rule = PRE_TOKENIZERS[pre]
    merger = Merger(
        tokens.ids,
        _read_merges(metadata),
        stand_ins={char: () for char in BYTE_OF if char not in tokens.ids},
        pre_tokenizer=rule.build(),
        ignore_merges=rule.ignore_merges,
    )
    return _Kind(
        merge=lambda text, _: merger.encode(text),
        spell=lambda index: spelled_bytes(tokens.texts[index]),
        adds_bos=rule.adds_bos and f"{_PREFIX}bos_token_id" in metadata,
        stands_for=byte_level_bytes,
        dropped=unspelled_bytes(tokens.ids),
    )


def _gemma4(metadata: Metadata, tokens: _Tokens) -> _Kind:
    require_bytes(tokens.ids)
    merger = LineMerger(tokens.ids, _read_merges(metadata))
    bytes_of = tokens.of_type(_BYTE)
    return _Kind(
        merge=lambda text, _: merger.encode(text),
        spell=lambda index: spelled_piece(tokens.texts[index], is_byte=index in bytes_of),
        adds_bos=True,
    )


def _sentence_piece(metadata: Metadata, tokens: _Tokens) -> _Kind:
    require_bytes(tokens.ids)
    scores = metadata.get(f"{_PREFIX}scores")
    if not isinstance(scores, np.ndarray) or scores.dtype.kind not in "fi":
        raise LoadError(f"{_PREFIX}scores must be an array of numbers, got {describe(scores)}")
    if scores.size != len(tokens.texts):
        raise LoadError(f"{_PREFIX}scores has {scores.size} entries for {len(tokens.texts)} tokens")
    bytes_of = tokens.of_type(_BYTE)
    never = bytes_of.union(*map(tokens.of_type, (_UNKNOWN, _CONTROL, _USER_DEFINED)))
    merger = PieceMerger(
        tokens.ids,
        scores.astype(np.float64),
        never=never,
        prefix=read_bool(metadata, f"{_PREFIX}add_space_prefix", True),
    )
    return _Kind(
        merge=merger.encode,
        spell=lambda index: spelled_piece(tokens.texts[index], is_byte=index in bytes_of),
        adds_bos=True,
        bos_id=1,  # where Llama's own vocabulary has them
        eos_id=2,
    )


def _read_ends(metadata: Metadata, tokens: _Tokens, kind: _Kind) -> Ends:
    def read_id(key: str, default: int | None = None) -> int | None:
        if f"{_PREFIX}{key}" not in metadata:
            return default if default is None or default < len(tokens.texts) else None
        return read_int(metadata, f"{_PREFIX}{key}", 0, len(tokens.texts) - 1)

    bos_id, eos_id = read_id("bos_token_id", kind.bos_id), read_id("eos_token_id", kind.eos_id)
    adds_bos = read_bool(metadata, f"{_PREFIX}add_bos_token", kind.adds_bos)
    if adds_bos and bos_id is None:
        raise LoadError(f"{_PREFIX}add_bos_token is set, but there is no bos_token_id")
    control = tokens.of_type(_CONTROL)
    turn_ends = {tokens.ids[text] for text in TURN_ENDS if text in tokens.ids}
    stops = {eos_id, *(read_id(key) for key in _OTHER_STOP_KEYS), *(turn_ends & control)}
    stop_ids = frozenset(stop for stop in stops if stop is not None)
    if not stop_ids:
        raise LoadError(f"{_PREFIX}eos_token_id is missing: no reply would end")
    return Ends(bos_id=bos_id, adds_bos=adds_bos, eos_id=eos_id, stop_ids=stop_ids)


def _read_types(metadata: Metadata, num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    value = metadata.get(f"{_PREFIX}token_type")
    if value is None:
        return np.ones(num_tokens, np.int64)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        raise LoadError(f"{_PREFIX}token_type must be an array of integers, got {describe(value)}")
    if value.size != num_tokens:
        raise LoadError(f"{_PREFIX}token_type has {value.size} entries for {num_tokens} tokens")
    return value.astype(np.int64)


def _ids_by_text(texts: list[str]) -> dict[str, int]:
    ids = {text: index for index, text in enumerate(texts)}
    if not texts or len(ids) != len(texts):
        twice = next((t for i, t in enumerate(texts) if ids[t] != i), None)
        problem = "is empty" if twice is None else f"has the token {describe(twice)} twice"
        raise LoadError(f"{_PREFIX}tokens {problem}")
    return ids


def _read_merges(metadata: Metadata) -> Iterator[tuple[str, str]]:
    for line in read_texts(metadata, f"{_PREFIX}merges"):
        at = line.find(" ", 1)
        if at < 0:
            raise LoadError(f"{_PREFIX}merges must be pairs of texts, got {describe(line)}")
        yield line[:at], line[at + 1 :]
