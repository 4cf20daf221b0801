"""Tokenizer: the makers' ids, exact round trips, streams that never show half a character."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import LoadError, RequestError
from slipstream.models.loading.bytes_map import BYTE_OF, spelled_bytes
from slipstream.models.loading.gguf import read_gguf
from slipstream.models.loading.gguf_tokenizer import read_tokenizer
from slipstream.models.loading.pre_tokenizers import PRE_TOKENIZERS
from slipstream.models.loading.tokenizer import Tokenizer
from tests.gguf_files import MERGES, SPECIAL, real_model, toy_tokenizer, toy_tokens

START, END = 1, 2
IDS = {text: index for index, text in enumerate(toy_tokens())}

# Ids of SmolLM2's vocabulary as llama.cpp gives them (llama-cpp-python 0.3.36, vocab_only, the same
# file, add_bos off, special tokens not parsed). 3,000 random mixtures of such texts agreed.
# fmt: off
SMOLLM_FACTS = {
    "Hello world": [19556, 905],
    "  two  spaces   three    four": [216, 827, 216, 5600, 256, 1296, 333, 1876],
    "a\n\nb\n \n  c": [81, 198, 198, 82, 198, 3717, 216, 265],
    "    def f(self, x: int) -> None:\n        return x ** 2  # note\n": [
        333, 753, 275, 24, 771, 28, 1792, 42, 464, 25, 4722, 1943, 42, 448, 1003, 1792,
        1903, 216, 34, 216, 907, 4109, 198,
    ],
    "1234567890": [33, 34, 35, 36, 37, 38, 39, 40, 41, 32],
    "½ ² Ⅻ ٣٤٥ 一二三 ①②": [
        16738, 216, 19133, 216, 173, 223, 121, 216, 164, 113, 164, 114, 164, 115, 216,
        22924, 16736, 230, 7906, 227, 216, 173, 235, 250, 173, 235, 111,
    ],
    "I'll you've don't DON'T we're 'tis they'd it's": [
        57, 3060, 346, 3543, 1326, 982, 422, 2154, 23, 68, 392, 2316, 637, 34818, 502,
        6737, 357, 506,
    ],
    "naïve café Ångström ß": [3546, 46494, 37366, 5549, 223, 863, 1321, 45682, 5549, 249],
    "日本語のテキスト、漢字とかな。": [
        23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134,
        11100, 226, 29917, 177, 137, 112, 36518, 7365, 118, 7365, 229, 7365, 120, 19076,
    ],
    "한국어 텍스트": [
        33085, 246, 181, 130, 251, 183, 240, 129, 48138, 223, 231, 183, 228, 114, 184,
        228, 133,
    ],
    "مرحبا بالعالم": [
        21706, 20602, 44626, 31462, 10805, 45726, 22208, 34966, 22208, 21706,
    ],
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family": [
        10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 321, 231,
        10813, 235, 116, 1564,
    ],
    "👍🏽 ok": [10813, 235, 231, 10813, 233, 138, 10907],
    "nbsp\xa0space\u3000ideographic\u2028line": [
        94, 32093, 15442, 11602, 12109, 218, 489, 4551, 321, 118, 1311,
    ],
    "\r\n windows\r\nline\r": [2738, 8393, 201, 198, 1311, 201],
    "a\x00b": [81, 190, 82],
    "a\x04b \x06 \x13": [81, 82, 216, 216],
    "!!!??? ... ---- ==== ####": [29646, 16693, 47, 4563, 216, 586, 446, 28733, 32713],
    "$x = \\frac{a}{b} + \\alpha^{2}$": [
        20, 104, 446, 3814, 18169, 107, 81, 15009, 82, 109, 1232, 3814, 13433, 21990, 34,
        24362,
    ],
    "                                 ": [12427, 216],
    "   \n   \n": [333, 472, 198],
    "\U00040000 plane four": [218, 218, 218, 8303, 1876],
    "e\u0301 combining n\u0303": [85, 151, 219, 9301, 304, 151, 221],
    "<|im_start|>user\nhi<|im_end|>\n": [
        44, 108, 306, 79, 3738, 108, 46, 4093, 198, 6004, 44, 108, 306, 79, 486, 108, 46,
        198,
    ],
    "<|im_start|><|im_end|><|endoftext|>": [
        44, 108, 306, 79, 3738, 108, 21198, 108, 306, 79, 486, 108, 21198, 108, 486, 1714,
        2692, 108, 46,
    ],
    "<|im_": [44, 108, 306, 79],
}
# fmt: on
# The same with special tokens parsed.
SPECIAL_FACTS = {
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "<|im_start|><|im_end|><|endoftext|>": [1, 2, 0],
    "<|im_": [44, 108, 306, 79],
}
# The same vocabulary written with another pre-tokenizer's name, again by llama.cpp.
OTHER_FACTS = {
    ("gpt-2", "x1y22z333"): [104, 33, 105, 34, 34, 106, 35, 35, 35],
    ("gpt-2", "$x = \\frac{a}"): [20, 104, 446, 3814, 18169, 107, 81, 109],
    ("default", "x1y22z333"): [104, 33, 105, 34, 34, 106, 35, 35, 35],
    ("default", "$x = \\frac{a}"): [20, 104, 216, 45, 216, 76, 18169, 107, 81, 109],
}


@functools.cache
def real_metadata() -> dict[str, Any]:
    return dict(read_gguf(real_model()).metadata)


@functools.cache
def real_tokenizer(pre: str = "smollm") -> Tokenizer:
    return read_tokenizer({**real_metadata(), "tokenizer.ggml.pre": pre})


def toy(**changes: Any) -> Tokenizer:
    """A toy tokenizer; a change to None removes a key."""
    metadata = toy_tokenizer() | {f"tokenizer.ggml.{key}": item for key, item in changes.items()}
    metadata = {key: item for key, item in metadata.items() if item is not None}
    for key, item in metadata.items():
        if key.endswith("token_type") and isinstance(item, list) and item[0] != "normal":
            metadata[key] = np.array(item, np.int32)
    return read_tokenizer(metadata)


TOY = toy()
TOY_GPT2 = toy(pre="gpt-2")


# ---- ids


@pytest.mark.parametrize("text", SMOLLM_FACTS)
def test_ids_of_awkward_text_equal_the_facts(text: str) -> None:
    assert real_tokenizer().encode(text, parse_special=False) == SMOLLM_FACTS[text]


@pytest.mark.parametrize("text", SPECIAL_FACTS)
def test_ids_with_special_tokens_equal_the_facts(text: str) -> None:
    assert real_tokenizer().encode(text, parse_special=True) == SPECIAL_FACTS[text]


@pytest.mark.parametrize(("pre", "text"), OTHER_FACTS)
def test_ids_of_other_pre_tokenizers_equal_the_facts(pre: str, text: str) -> None:
    assert real_tokenizer(pre).encode(text, parse_special=False) == OTHER_FACTS[pre, text]


def slow_bpe(text: str, *, single_digits: bool) -> list[int]:
    """BPE as the paper words it: merge the pair of the lowest rank until none is left (ASCII)."""
    words = r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    spelling = {byte: char for char, byte in BYTE_OF.items()}
    pieces = re.split("([0-9])", text) if single_digits else [text]
    ids: list[int] = []
    for word in (word for piece in pieces for word in re.findall(words, piece)):
        parts = [spelling[byte] for byte in word.encode()]
        while pairs := [pair for pair in itertools.pairwise(parts) if pair in ranks]:
            best = min(pairs, key=lambda pair: ranks[pair])
            at = next(i for i in range(len(parts)) if tuple(parts[i : i + 2]) == best)
            parts[at : at + 2] = ["".join(best)]
        ids += [IDS[part] for part in parts]
    return ids


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="helowrdit 12\n\t'.!", max_size=30))
def test_ids_equal_a_slow_bpe(text: str) -> None:
    assert TOY.encode(text, parse_special=False) == slow_bpe(text, single_digits=True)
    assert TOY_GPT2.encode(text, parse_special=False) == slow_bpe(text, single_digits=False)


def test_digits_stand_alone_in_smollm_only() -> None:
    assert TOY.encode("12", parse_special=False) == [IDS["1"], IDS["2"]]
    assert TOY_GPT2.encode("12", parse_special=False) == [IDS["12"]]


def test_no_space_is_put_in_front() -> None:
    assert TOY.encode("hello", parse_special=False) == [IDS["hello"]]
    assert TOY.encode(" wor", parse_special=False) == [IDS["Ġwor"]]


# ---- special tokens


def test_control_tokens_are_parsed_only_when_asked() -> None:
    text = "<|im_start|>hello<|im_end|>"
    assert TOY.encode(text, parse_special=True) == [START, IDS["hello"], END]
    spelled = TOY.encode(text, parse_special=False)
    assert not {0, START, END} & set(spelled)
    assert TOY.decode(spelled) == text


def test_user_defined_tokens_are_always_parsed() -> None:
    types = [3] * len(SPECIAL) + [1] * (len(toy_tokens()) - len(SPECIAL)) + [4, 4]
    tokens = [*toy_tokens(), "<tool>", "<tool>>"]
    tokenizer = toy(tokens=tokens, token_type=types)
    wide, narrow = len(tokens) - 1, len(tokens) - 2
    ids = tokenizer.encode("<tool>>hello<tool>", parse_special=False)
    assert ids == [wide, IDS["hello"], narrow]  # the longest goes first
    assert tokenizer.decode(ids) == "<tool>>hello<tool>"


def test_bos_is_put_in_front_once_if_the_model_asks() -> None:
    tokenizer = toy(add_bos_token=True)
    assert tokenizer.encode("hello", parse_special=False) == [START, IDS["hello"]]
    assert tokenizer.encode("", parse_special=False) == [START]
    assert tokenizer.encode("<|im_start|>hello", parse_special=True) == [START, IDS["hello"]]
    assert TOY.encode("", parse_special=True) == []


def test_stop_ids_are_those_of_the_metadata() -> None:
    assert TOY.stop_ids == {END}
    assert toy(eot_token_id=0, eom_token_id=5).stop_ids == {END, 0, 5}
    assert toy(eos_token_id=None, eot_token_id=0).stop_ids == {0, END}  # a known end of turns
    assert (TOY.bos_id, TOY.eos_id, TOY.vocab_size) == (START, END, len(toy_tokens()))


# ---- bytes and text


def test_every_byte_has_a_spelling() -> None:
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert spelled_bytes("ĠhiĊ") == b" hi\n"
    assert spelled_bytes("a→") == b"a" + "→".encode()
    # The characters of the original table, from its documentation: space, newline, tab, 0xFF.
    assert [BYTE_OF[char] for char in "ĠĊĉÿ"] == [32, 10, 9, 255]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_decode_inverts_encode(text: str) -> None:
    assert TOY.decode(TOY.encode(text, parse_special=False)) == text


def test_control_tokens_leave_no_text() -> None:
    assert TOY.decode([START, IDS["hello"], END]) == "hello"
    assert TOY.token_bytes(END) == b""
    assert TOY.token_text(END) == "<|im_end|>"
    assert TOY.token_bytes(IDS["Ġwor"]) == b" wor"


@pytest.mark.parametrize("token_id", [-1, len(toy_tokens()), 1 << 40])
def test_ids_outside_the_vocabulary_are_request_errors(token_id: int) -> None:
    for act in (TOY.token_bytes, TOY.token_text, lambda i: TOY.decode([i])):
        with pytest.raises(RequestError, match=r"must be in \[0, 269\]"):
            act(token_id)
    with pytest.raises(RequestError):
        TOY.detokenizer().push([token_id])


def test_lone_surrogates_are_request_errors() -> None:
    with pytest.raises(RequestError, match="surrogate at 2"):
        TOY.encode("hi\udc80", parse_special=False)


# ---- streams


@settings(max_examples=400, deadline=None)
@given(
    pushes=st.lists(
        st.lists(
            st.integers(0, len(toy_tokens()) - 1)
            # lead and continuation bytes, so that broken and whole sequences are common
            | st.sampled_from(
                [
                    3 + list(BYTE_OF.values()).index(b)
                    for b in b"\xe2\x82\xac\xf0\x9f\x98\x80\xc3\xed\xa0"
                ]
            ),
            max_size=5,
        ),
        max_size=6,
    )
)
def test_pieces_join_to_the_whole_for_any_split(pushes: list[list[int]]) -> None:
    stream = TOY.detokenizer()
    pieces = [stream.push(ids) for ids in pushes]
    whole = TOY.decode([token_id for ids in pushes for token_id in ids])
    assert "".join(pieces) == whole[: len("".join(pieces))]
    assert "".join(pieces) + stream.finish() == whole


def test_a_character_appears_when_its_last_byte_does() -> None:
    ids = TOY.encode("a😀é", parse_special=False)
    assert len(ids) == 7
    stream = TOY.detokenizer()
    assert [stream.push([token_id]) for token_id in ids] == ["a", "", "", "", "😀", "", "é"]
    assert stream.finish() == ""


def test_a_sequence_never_completed_ends_as_one_replacement() -> None:
    ids = TOY.encode("😀", parse_special=False)[:3]
    stream = TOY.detokenizer()
    assert stream.push(ids) == ""
    assert stream.finish() == "\ufffd" == TOY.decode(ids)


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model": "bert"}, ["gpt2, llama, gemma4", "'bert'"]),
        ({"model": None}, ["tokenizer.ggml.model", "missing"]),
        ({"pre": "kimi-k2"}, [*PRE_TOKENIZERS, "'kimi-k2'"]),
        ({"tokens": None}, ["tokens", "missing"]),
        ({"tokens": []}, ["tokens", "0 tokens"]),
        ({"tokens": ["a", "a"], "token_type": None}, ["'a'", "twice"]),
        ({"token_type": [1, 1]}, ["token_type has 2 entries for 270"]),
        ({"token_type": ["normal"]}, ["token_type", "integers"]),
        ({"merges": None}, ["merges", "missing"]),
        ({"merges": ["h q"]}, ["merges", "hq"]),
        ({"merges": ["he"]}, ["merges"]),
        ({"merges": ["☃ a"]}, ["merges", "☃"]),
        ({"eos_token_id": None, "token_type": None}, ["eos_token_id", "missing"]),
        ({"eos_token_id": 270}, ["eos_token_id", "[0, 269]", "270"]),
        ({"bos_token_id": None, "add_bos_token": True}, ["bos_token_id"]),
        ({"add_bos_token": 1}, ["add_bos_token", "bool"]),
    ],
)
def test_unsupported_tokenizers_are_refused(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(LoadError) as caught:
        toy(**changes)
    for part in parts:
        assert part in caught.value.message


def test_a_missing_pre_tokenizer_means_default() -> None:
    text = "x = 1234 (hello)"
    ids = toy(pre=None).encode(text, parse_special=False)
    assert ids == toy(pre="default").encode(text, parse_special=False)
