"""The tokenizer of a Hugging Face or MLX folder: tokenizer.json, run by the `tokenizers` library.

The library does all that the file says. What is read here beside it is what each id adds to a text,
from the file's decoder, and which ids begin and end texts, from the files around it.

Two copies are kept, one of which does not look for control tokens in a text. The second is made
when a text from outside first comes, since a large vocabulary takes a second.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from slipstream.errors import LoadError
from slipstream.models.loading.bytes_map import spelled_bytes
from slipstream.models.loading.folder_ends import read_folder_ends
from slipstream.models.loading.metadata import describe
from slipstream.models.loading.reach import Reach, json_reach
from slipstream.models.loading.sentence_piece import SPACE, spelled_piece
from slipstream.models.loading.tokenizer import Tokenizer, Vocabulary

TOKENIZER = "tokenizer.json"
_MAX_BYTES = 1 << 28  # the largest there are have some 35 MB


def read_json_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Read a folder's tokenizer.

    Args:
        vocab_size: rows of the embedding; ids that only it has add nothing to a text.

    Raises:
        LoadError: a file is missing or damaged, the tokenizer is of a kind whose ids cannot be
            turned to bytes one by one, or it has ids that the embedding has not.
    """
    source = _read(folder / TOKENIZER)
    library = _parse(source)
    texts = _read_texts(library, vocab_size)
    added = library.get_added_tokens_decoder()
    control = {index for index, token in added.items() if token.special}
    unused = {index for index, text in enumerate(texts) if text is None}
    control |= unused
    spelled = [f"[PAD{index}]" if text is None else text for index, text in enumerate(texts)]
    block = json.loads(source)
    spell_normal = _read_speller(block.get("decoder"))

    def spell(index: int) -> bytes:
        return spelled[index].encode() if index in added else spell_normal(spelled[index])

    def reach() -> Reach | None:
        return json_reach(json.loads(source), spelled, {spelled[index] for index in control})

    unknown = library.token_to_id(str(block.get("model", {}).get("unk_token")))
    return Tokenizer(
        Vocabulary(
            texts=spelled,
            control_ids=frozenset(control),
            spell=spell,
            unused_ids=frozenset(unused),
        ),
        read_folder_ends(folder, library, control, vocab_size),
        _Encoder(source, library, {spelled[index]: index for index in control - {unknown}}).encode,
        reach,
    )


class _Encoder:
    """Encodes texts with the library.

    Args:
        control: texts and ids of the tokens that text from outside must not spell.
    """

    def __init__(self, source: str, library: Library, control: Mapping[str, int]) -> None:
        self._source, self._parses = source, library
        self._plain: Library | None = None
        self._lock = threading.Lock()
        self._control = frozenset(control.values())
        self._spelled = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))))

    def encode(self, text: str, parse_special: bool) -> list[int]:
        library = self._parses if parse_special else self._without_control()
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        if parse_special or self._control.isdisjoint(ids):
            return ids
        # The file's merges put a control token together from its letters: keep these apart.
        cuts = [match.start() + 1 for match in self._spelled.finditer(text)]
        pieces = [text[low:high] for low, high in itertools.pairwise([0, *cuts, len(text)])]
        apart = [library.encode(piece, add_special_tokens=False).ids for piece in pieces]
        return [index for part in apart for index in part if index not in self._control]

    def _without_control(self) -> Library:
        with self._lock:
            if self._plain is None:
                self._plain = _parse(self._source)
                self._plain.encode_special_tokens = True
            return self._plain


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise LoadError(f"{path.name} must have at most {_MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LoadError(
            f"{path.name} is missing", hint="tokenizer.model alone is not read; save a fast one"
        ) from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path.name} cannot be read: {error}") from error


def _parse(source: str) -> Library:
    try:
        library = Library.from_str(source)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise LoadError(f"{TOKENIZER} is damaged or of an unknown kind: {error}") from error
    library.no_truncation()
    library.no_padding()
    return library


def _read_texts(library: Library, vocab_size: int) -> Sequence[str | None]:
    """Return each id's text, None for ids that the tokenizer does not have."""
    if not library.get_vocab_size(with_added_tokens=False):
        raise LoadError(f"{TOKENIZER}: the vocabulary must have at least 1 token, got 0")
    ids = library.get_vocab(with_added_tokens=True)
    most = max(ids.values(), default=-1)
    if not 0 <= most < vocab_size:
        raise LoadError(
            f"the tokenizer's ids must be in [0, {vocab_size - 1}], the rows of the embedding, "
            f"got {most}"
        )
    texts: list[str | None] = [None] * vocab_size
    for text, index in ids.items():
        texts[index] = text
    return texts


def _read_speller(decoder: Any) -> Callable[[str], bytes]:
    """Return what a decoder makes of one token, neighbours apart.

    A step that strips the space in front of a text is left out: replies go on from a prompt.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return spelled_bytes
    if kinds and all(map(_is_piece_step, steps)) and {"Replace", "Metaspace"} & {*kinds}:
        return lambda text: spelled_piece(text, is_byte="ByteFallback" in kinds)
    raise LoadError(
        f"{TOKENIZER}: the decoder must be byte-level or SentencePiece's, got "
        f"{', '.join(map(str, kinds)) or describe(decoder)}"
    )


def _steps(decoder: Any) -> Collection[Mapping[str, Any]]:
    steps = decoder.get("decoders") if isinstance(decoder, dict) else None
    if steps is None:
        steps = [decoder]
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _is_piece_step(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Replace":
        return step.get("pattern") == {"String": SPACE} and step.get("content") == " "
    if kind == "Metaspace":
        return step.get("replacement") == SPACE
    return kind in ("ByteFallback", "Fuse") or (kind == "Strip" and step.get("content") == " ")
