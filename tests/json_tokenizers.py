"""tokenizer.json files for tests, of the vocabularies whose ids were recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from slipstream.models.loading.pre_tokenizers import PRE_TOKENIZERS
from slipstream.models.loading.sentence_piece import SPACE, ranked_merges

RECORD = json.loads((Path(__file__).parent / "data" / "token_ids.json").read_text())
VOCABULARIES: dict[str, dict[str, Any]] = RECORD["vocabularies"]
BEGIN = "<s>"
CONTROL, USER_DEFINED = 3, 4


def byte_level(pre: str, *, adds_bos: bool = False) -> Tokenizer:
    """The recorded byte-level vocabulary under a rule of cutting."""
    keys = VOCABULARIES["byte level"]
    merges = [tuple(line.split(" ")) for line in keys["merges"]]
    rule = PRE_TOKENIZERS[pre]
    library = Tokenizer(BPE(_ids(keys), merges, ignore_merges=rule.ignore_merges))
    library.pre_tokenizer = rule.build()
    library.decoder = decoders.ByteLevel()
    return _finish(library, keys, adds_bos)


def sentence_piece(*, adds_bos: bool = True) -> Tokenizer:
    """The recorded SentencePiece vocabulary, as Llama 2's file has its own."""
    keys = VOCABULARIES["SentencePiece"]
    ids = _ids(keys)
    normal = {text: i for text, i in ids.items() if keys["token_type"][i] == 1}
    scores = np.array(keys["scores"])
    merges = ranked_merges(normal, normal.keys(), scores)
    library = Tokenizer(BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finish(library, keys, adds_bos)


def metaspace() -> Tokenizer:
    """The same with the space put in front of the text alone, as newer files have it."""
    library = sentence_piece()
    library.normalizer = None  # type: ignore[assignment]
    library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    return library


def write_tokenizer(
    folder: Path, library: Tokenizer, files: Mapping[str, Mapping[str, Any]] | None = None
) -> Path:
    """Write tokenizer.json and the files around it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    default = {"tokenizer_config.json": {"bos_token": BEGIN, "eos_token": {"content": "</s>"}}}
    for name, block in (default | dict(files or {})).items():
        (folder / name).write_text(json.dumps(block))
    return folder


def _ids(keys: Mapping[str, Any]) -> dict[str, int]:
    return {text: index for index, text in enumerate(keys["tokens"])}


def _finish(library: Tokenizer, keys: Mapping[str, Any], adds_bos: bool) -> Tokenizer:
    kinds = dict(zip(keys["tokens"], keys["token_type"], strict=True))
    special = [text for text, kind in kinds.items() if kind in (2, CONTROL)]
    library.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    library.add_tokens(
        [AddedToken(text, normalized=False) for text, kind in kinds.items() if kind == USER_DEFINED]
    )
    if adds_bos:
        library.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, library.token_to_id(BEGIN))]
        )
    return library
