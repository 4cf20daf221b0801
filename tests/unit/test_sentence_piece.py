"""SentencePiece vocabularies: joins by score, bytes where no token fits, no control from text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import LoadError
from slipstream.models.loading.gguf_tokenizer import read_tokenizer
from slipstream.models.loading.sentence_piece import BYTES
from slipstream.models.loading.tokenizer import Tokenizer

CHARS = ["▁", "a", "b", "c", "<", "s", ">"]
# The best score first; "<s" and "☃a" have parts that are no tokens, or lead to a control token.
JOINS = ["ab", "bc", "▁a", "abc", "▁ab", "<s", "☃a", "▁▁"]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *JOINS, *CHARS, "<tool>"]
IDS = {text: index for index, text in enumerate(TOKENS)}
TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(JOINS) + len(CHARS)), 4]


def make(**changes: Any) -> Tokenizer:
    """A tokenizer; a change to None removes a key."""
    keys: dict[str, Any] = {
        "model": "llama",
        "tokens": TOKENS,
        "token_type": np.array(TYPES, np.int32),
        "scores": -np.arange(len(TOKENS), dtype=np.float32),
    }
    keys |= changes
    return read_tokenizer({f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None})


PLAIN = make(add_space_prefix=False, add_bos_token=False)


def spelled(text: str, tokenizer: Tokenizer = PLAIN, *, parse_special: bool = False) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, parse_special=parse_special)]


def slow_joins(text: str) -> list[str]:
    """Join the best pair of neighbours, the leftmost of equals, until none is a token."""
    parts = list(text.replace(" ", "▁"))
    while True:
        found = [
            (IDS[parts[i] + parts[i + 1]], i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in JOINS
        ]
        if not found:
            break
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    whole = [[part] if part in IDS else [BYTES[byte] for byte in part.encode()] for part in parts]
    return [text for texts in whole for text in texts]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abc <s>☃é▁", max_size=24))
def test_ids_equal_slow_joins(text: str) -> None:
    assert spelled(text) == slow_joins(text)


def test_a_character_that_is_no_token_is_joined_or_becomes_bytes() -> None:
    assert spelled("☃a") == ["☃a"]
    assert spelled("☃b") == ["<0xE2>", "<0x98>", "<0x83>", "b"]
    assert PLAIN.decode(PLAIN.encode("☃b☃a", parse_special=False)) == "☃b☃a"


def test_text_never_spells_a_control_token() -> None:
    assert spelled("<s>") == ["<s", ">"]
    assert spelled("<s>", parse_special=True) == ["<s>"]
    assert spelled("<unk><0x41>", parse_special=True)[0] == "<unk>"
    assert spelled("<tool>a") == ["<tool>", "a"]


def test_a_space_stands_in_front_of_text_that_begins_or_follows_a_special_token() -> None:
    tokenizer = make()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, 2, True)
    assert spelled("a<s>b", tokenizer, parse_special=True) == ["<s>", "▁a", "<s>", "▁", "b"]
    assert spelled(" a", tokenizer) == ["<s>", "▁", "▁a"]
    assert spelled("", tokenizer) == ["<s>"]
    assert tokenizer.decode(tokenizer.encode("a b", parse_special=False)) == " a b"


def test_a_character_of_bytes_appears_when_its_last_byte_does() -> None:
    stream = PLAIN.detokenizer()
    ids = PLAIN.encode("é ☃b", parse_special=False)
    assert [stream.push([index]) for index in ids] == ["", "é", " ", "", "", "☃", "b"]
    assert stream.push([IDS["<0xE2>"], IDS["a"]]) == "\ufffda"


def without(text: str) -> list[str]:
    return [f"[{token}]" if token == text else token for token in TOKENS]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"scores": None}, ["scores", "missing"]),
        ({"scores": TOKENS}, ["scores", "numbers", "texts"]),
        ({"scores": np.zeros(3, np.float32)}, ["scores has 3 entries", f"{len(TOKENS)} tokens"]),
        ({"scores": np.full(len(TOKENS), np.nan, np.float32)}, ["finite"]),
        (
            {"scores": np.full(len(TOKENS), -1000, np.float32)},
            ["must order them", "1 scores for 8"],
        ),
        ({"tokens": without("<0x0A>")}, ["every byte", "<0x0A> is missing"]),
        ({"bos_token_id": len(TOKENS)}, ["bos_token_id", f"got {len(TOKENS)}"]),
        ({"add_space_prefix": 1}, ["add_space_prefix", "bool"]),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(LoadError) as caught:
        make(**changes)
    for part in parts:
        assert part in caught.value.message


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 40), 1 << 40),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.text(max_size=3), max_size=4),
    st.integers(0, len(TOKENS)).map(lambda n: TOKENS[:n]),
    st.integers(0, len(TOKENS)).map(lambda n: np.arange(n, dtype=np.int64) - 3),
    st.just(np.full(len(TOKENS), np.inf)),
)
KEYS = ("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id")


@settings(max_examples=200, deadline=None)
@given(
    model=st.sampled_from(["gpt2", "llama", "gemma4"]),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=2),
)
def test_damaged_metadata_are_a_load_error_or_another_tokenizer(
    model: str, changes: dict[str, Any]
) -> None:
    try:
        tokenizer = make(**({"model": model, "merges": ["a b", "ab c"]} | changes))
    except LoadError:
        return
    tokenizer.decode(tokenizer.encode("abc <s> é", parse_special=True))
