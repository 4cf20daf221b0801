"""A folder's tokenizer says what transformers' says of the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from slipstream.models.loading.json_tokenizer import read_json_tokenizer
from tests.json_tokenizers import RECORD, byte_level, metaspace, sentence_piece, write_tokenizer

transformers = pytest.importorskip("transformers", reason="parity needs transformers")

LIBRARIES = {
    "llama 3": byte_level("llama-bpe", adds_bos=True),
    "qwen2": byte_level("qwen2"),
    "SentencePiece": sentence_piece(),
    "Metaspace": metaspace(),
}
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "<|im_end|>",
    "unk_token": "<unk>",
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_ids_and_text_are_transformers(name: str, tmp_path: Path) -> None:
    library: Library = LIBRARIES[name]
    write_tokenizer(tmp_path, library, {"tokenizer_config.json": CONFIG})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2000}))
    in_bytes = name in ("llama 3", "qwen2")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = read_json_tokenizer(tmp_path, 2000)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in RECORD["texts"]:
        whole = theirs(text)["input_ids"]
        if whole[:2] != [ours.bos_id] * 2:  # a beginning that is spelled is not said twice
            assert ours.encode(text, parse_special=True) == whole
        ids = theirs(text, split_special_tokens=True)["input_ids"]
        assert ours.encode(text, parse_special=False) == ids
        back = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # In pieces theirs leaves out a space in front of a text; a reply goes on from a prompt.
        mine = ours.decode(ids)
        assert back == (mine if in_bytes else mine.removeprefix(" "))
