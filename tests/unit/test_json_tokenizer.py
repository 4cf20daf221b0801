"""tokenizer.json: the ids of the same GGUF vocabulary, the folder's ends, no control from text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders
from tokenizers.models import BPE, WordLevel

from slipstream.errors import LoadError
from slipstream.models.loading.json_tokenizer import read_json_tokenizer
from slipstream.models.loading.tokenizer import Tokenizer
from tests.json_tokenizers import (
    RECORD,
    VOCABULARIES,
    byte_level,
    metaspace,
    sentence_piece,
    write_tokenizer,
)

TEXTS: list[str] = RECORD["texts"]
SIZE = {name: len(keys["tokens"]) for name, keys in VOCABULARIES.items()}
START, END = 1, 2
RULES = ["llama-bpe", "qwen2", "gpt-2", "smollm", "tekken"]


def read(folder: Path, library: Library, files: Any = None, *, size: int = 2000) -> Tokenizer:
    return read_json_tokenizer(write_tokenizer(folder, library, files), size)


@pytest.mark.parametrize("pre", RULES)
def test_ids_are_those_of_the_same_gguf_vocabulary(pre: str, tmp_path: Path) -> None:
    tokenizer = read(tmp_path, byte_level(pre))
    recorded = RECORD["ids"][f"byte level {pre}"]
    for text, plain, special in zip(TEXTS, recorded["plain"], recorded["special"], strict=True):
        assert tokenizer.encode(text, parse_special=False) == plain
        assert tokenizer.encode(text, parse_special=True) == special


def test_ids_of_sentence_piece_are_those_of_gguf(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, sentence_piece(adds_bos=False))
    recorded = RECORD["ids"]["SentencePiece"]
    for text, plain, special in zip(TEXTS, recorded["plain"], recorded["special"], strict=True):
        assert tokenizer.encode(text, parse_special=False) == plain
        assert tokenizer.encode(text, parse_special=True) == special


@pytest.mark.parametrize(
    ("library", "in_pieces"),
    [(byte_level("qwen2"), False), (sentence_piece(), True), (metaspace(), True)],
)
def test_streams_join_to_the_text(library: Library, in_pieces: bool, tmp_path: Path) -> None:
    tokenizer = read(tmp_path, library)
    for text in TEXTS:
        ids = tokenizer.encode(text, parse_special=False)
        stream = tokenizer.detokenizer()
        pieces = [stream.push([index]) for index in ids]
        whole = "".join(pieces) + stream.finish()
        assert whole == tokenizer.decode(ids)
        spelled = " " + text.replace("▁", " ") if in_pieces and text else text
        assert whole in (spelled, spelled[1:]) if in_pieces else whole == spelled


def test_control_tokens_are_parsed_only_when_asked(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, byte_level("llama-bpe", adds_bos=True))
    text = "<|im_start|>hi<|im_end|>"
    first, *_, last = tokenizer.encode(text, parse_special=True)[1:]
    assert [tokenizer.token_text(index) for index in (first, last)] == [
        "<|im_start|>",
        "<|im_end|>",
    ]
    plain = tokenizer.encode(text, parse_special=False)
    assert not tokenizer.control_ids & {*plain[1:]}
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(tokenizer.encode(text, parse_special=True)) == "hi"
    tool = tokenizer.encode("<tool>", parse_special=False)  # user-defined, so part of any text
    assert [tokenizer.token_text(index) for index in tool[1:]] == ["<tool>"]
    assert tokenizer.decode(tool) == "<tool>"


def test_merges_never_put_a_control_token_together(tmp_path: Path) -> None:
    ids = {text: index for index, text in enumerate(["<unk>", "<s>", "<", "s", ">", "<s"])}
    library = Library(BPE(ids, [("<", "s"), ("<s", ">")], unk_token="<unk>"))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<unk>", "<s>"])
    tokenizer = read(tmp_path, library, {"config.json": {"eos_token_id": 1}})
    assert tokenizer.encode("<s>", parse_special=True) == [1]
    assert tokenizer.encode("s<s>s<s", parse_special=False) == [3, 2, 3, 4, 3, 5]
    assert tokenizer.encode("sx", parse_special=False) == [3, 0]  # unknown, which is no intrusion


def test_bos_is_what_the_post_processor_puts_in_front(tmp_path: Path) -> None:
    asks = read(tmp_path / "a", sentence_piece(adds_bos=True))
    assert (asks.bos_id, asks.adds_bos) == (START, True)
    assert asks.encode("", parse_special=False) == [START]
    assert asks.encode("<s>hi", parse_special=True)[:2] != [START, START]
    quiet = read(tmp_path / "b", sentence_piece(adds_bos=False))
    assert (quiet.bos_id, quiet.adds_bos) == (START, False)
    assert quiet.encode("", parse_special=False) == []
    nameless = read(
        tmp_path / "c", sentence_piece(), {"tokenizer_config.json": {"eos_token": "</s>"}}
    )
    assert (nameless.bos_id, nameless.adds_bos) == (START, True)


@pytest.mark.parametrize(
    ("files", "eos_id", "stop_ids"),
    [
        ({}, END, {END, 4}),  # <|im_end|> is known to end turns
        ({"generation_config.json": {"eos_token_id": [9, 7]}}, END, {END, 4, 7, 9}),
        ({"config.json": {"eos_token_id": 8}}, END, {END, 4, 8}),
        ({"config.json": {"text_config": {"eos_token_id": [6]}}}, END, {END, 4, 6}),
        ({"tokenizer_config.json": {}, "config.json": {"eos_token_id": [9, 7]}}, 9, {4, 7, 9}),
        ({"generation_config.json": {"eos_token_id": None}}, END, {END, 4}),
    ],
)
def test_stop_ids_are_all_that_the_folder_names(
    files: dict[str, Any], eos_id: int, stop_ids: set[int], tmp_path: Path
) -> None:
    tokenizer = read(tmp_path, byte_level("qwen2"), files)
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (eos_id, stop_ids)


def test_rows_to_spare_are_ids_that_add_nothing(tmp_path: Path) -> None:
    size = SIZE["byte level"]
    tokenizer = read(tmp_path, byte_level("qwen2"), size=size + 5)
    assert tokenizer.vocab_size == size + 5
    assert tokenizer.token_bytes(size + 4) == b""
    assert tokenizer.decode([size, size + 4]) == ""
    assert tokenizer.token_text(size) != tokenizer.token_text(size + 4)


def test_more_ids_than_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"\[0, 99\].*got 905"):
        read(tmp_path, byte_level("qwen2"), size=100)


def broken(change: str) -> str:
    block = json.loads(byte_level("qwen2").to_str())
    if change == "cut":
        return json.dumps(block)[:-200]
    if change == "list":
        return "[]"
    if change == "nested":
        return "[" * 100_000
    if change == "decoder":
        block["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    if change == "no decoder":
        block["decoder"] = None
    if change == "model":
        block["model"] = {"type": "Sorcery"}
    if change == "empty":
        block["model"] |= {"vocab": {}, "merges": []}
    if change == "merges":
        block["model"]["merges"].insert(0, ["☃", "a"])
    return json.dumps(block)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("cut", "damaged"),
        ("list", "damaged"),
        ("nested", "damaged"),
        ("decoder", "WordPiece"),
        ("no decoder", "missing"),
        ("model", "damaged"),
        ("merges", "damaged"),
        ("empty", "at least 1 token, got 0"),
    ],
)
def test_what_is_not_read_is_refused(change: str, part: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level("qwen2"))
    (tmp_path / "tokenizer.json").write_text(broken(change))
    with pytest.raises(LoadError, match=part):
        read_json_tokenizer(tmp_path, 2000)


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"generation_config.json": {"eos_token_id": [1, "2"]}}, "generation_config.json.*'2'"),
        ({"config.json": {"eos_token_id": 2000}}, r"\[0, 1999\], got 2000"),
        ({"config.json": {"eos_token_id": True}}, "got True"),
        ({"config.json": {"bos_token_id": -1}}, "bos_token_id.*got -1"),
    ],
)
def test_ends_that_make_no_sense_are_refused(
    files: dict[str, Any], part: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=part):
        read(tmp_path, byte_level("qwen2"), files)


def test_a_reply_that_would_not_end_is_refused(tmp_path: Path) -> None:
    library = Library(WordLevel({"a": 0, "b": 1}, unk_token="b"))
    library.decoder = decoders.ByteLevel()
    with pytest.raises(LoadError, match="no reply would end"):
        read(tmp_path, library, {"tokenizer_config.json": {}})


def test_a_folder_without_one_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing") as caught:
        read_json_tokenizer(tmp_path, 10)
    assert caught.value.hint


WHOLE = sentence_piece().to_str()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_is_a_load_error_or_another_tokenizer(data: st.DataObject, tmp_path: Path) -> None:
    place = data.draw(st.integers(0, len(WHOLE) - 1))
    piece = data.draw(st.sampled_from(['"', "}", "]", "0", "-", "null", ",", "é", "\\u0000", ""]))
    write_tokenizer(tmp_path, sentence_piece())
    (tmp_path / "tokenizer.json").write_text(WHOLE[:place] + piece + WHOLE[place + 1 :])
    try:
        tokenizer = read_json_tokenizer(tmp_path, 2000)
    except LoadError:
        return
    tokenizer.decode(tokenizer.encode("Hello world", parse_special=False))
