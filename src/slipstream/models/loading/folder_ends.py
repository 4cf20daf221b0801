"""Which ids begin and end texts, from the files of a Hugging Face folder.

The beginning is what the tokenizer's own post-processor puts in front of a text: it alone decides,
and `add_bos_token` beside a tokenizer.json is ignored, as by transformers 5. Ends are all that any
file names: `eos_token` of tokenizer_config.json, `eos_token_id`, one or a list, of
generation_config.json and of config.json, and control tokens that are known to end turns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from slipstream.errors import LoadError
from slipstream.models.loading.folder import CONFIG, read_json
from slipstream.models.loading.folder_template import TOKENIZER_CONFIG
from slipstream.models.loading.metadata import describe
from slipstream.models.loading.tokenizer import TURN_ENDS, Ends

GENERATION_CONFIG = "generation_config.json"
_PROBE = "a"  # any text that has ids


def read_folder_ends(
    folder: Path, library: Library, control: Collection[int], vocab_size: int
) -> Ends:
    """Read the ids that begin and end texts.

    Args:
        control: ids of the tokenizer's control tokens.
        vocab_size: ids are below it.

    Raises:
        LoadError: a file is damaged, an id is outside the vocabulary, nothing ends a reply, or the
            tokenizer puts more than one id in front of a text.
    """
    tokens = _optional(folder / TOKENIZER_CONFIG)
    config = _optional(folder / CONFIG)
    text_config = config.get("text_config")
    blocks = [
        (GENERATION_CONFIG, _optional(folder / GENERATION_CONFIG)),
        (CONFIG, config),
        (CONFIG, text_config if isinstance(text_config, dict) else {}),
    ]
    begins, ends = (
        [index for name, block in blocks for index in _ids(name, block, key, vocab_size)]
        for key in ("bos_token_id", "eos_token_id")
    )
    bos_id = _token_id(library, tokens, "bos_token", begins)
    eos_id = _token_id(library, tokens, "eos_token", ends)
    front = _front(library)
    named = {eos_id, *({library.token_to_id(text) for text in TURN_ENDS} & {*control})}
    stop_ids = frozenset(index for index in {*ends, *named} if index is not None)
    if not stop_ids:
        raise LoadError(f"{GENERATION_CONFIG}: eos_token_id is missing: no reply would end")
    return Ends(
        bos_id=front[0] if front else bos_id,
        adds_bos=bool(front),
        eos_id=eos_id,
        stop_ids=stop_ids,
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _ids(name: str, block: Mapping[str, Any], key: str, size: int) -> list[int]:
    """Return one id or a list of them as a list; a key that is null counts as absent."""
    value = block.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    for index in found:
        if type(index) is not int or not 0 <= index < size:
            raise LoadError(f"{name}: {key} must be in [0, {size - 1}], got {describe(index)}")
    return found


def _token_id(
    library: Library, tokens: Mapping[str, Any], key: str, others: list[int]
) -> int | None:
    """Return the id of a token that is named by its text, else the first of the others."""
    value = tokens.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    found = library.token_to_id(text) if isinstance(text, str) else None
    return found if found is not None else next(iter(others), None)


def _front(library: Library) -> list[int]:
    """Return what is put in front of a text. What is put behind one would end it: it is left out.

    Raises:
        LoadError: more than one id.
    """
    plain = library.encode(_PROBE, add_special_tokens=False).ids
    whole = library.encode(_PROBE, add_special_tokens=True).ids
    starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    front: list[int] = whole[: next(starts, 0)]
    if len(front) > 1:
        raise LoadError(f"the tokenizer must put at most one id in front of a text, got {front}")
    return front
