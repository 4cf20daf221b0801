"""A draft model's tokens are the target's, id by id; padding may differ."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from slipstream.errors import MismatchError
from slipstream.models.loading.same_vocabulary import check_same_vocabulary

WORDS = ["a", "b", "ab", "<|end|>"]


@dataclass(frozen=True)
class Tokens:
    """As much of a tokenizer as is compared."""

    vocabulary: list[str]
    unused_ids: frozenset[int] = frozenset()


def check(target: Tokens, draft: Tokens) -> None:
    """Check both ways: either may be the longer one."""
    check_same_vocabulary(target, draft)
    check_same_vocabulary(draft, target)


@pytest.mark.parametrize(
    "padding",
    [
        [],
        ["[PAD4]", "[PAD5]"],
        ["<pad_4>"],
        ["<unused0>", "<unused1>"],
        ["<|reserved_special_token_0|>"],
        ["[unused12]"],
        [""],
    ],
)
def test_padding_beyond_the_shorter_one_is_tolerated(padding: list[str]) -> None:
    check(Tokens(WORDS), Tokens(WORDS + padding))


def test_what_a_file_calls_unused_is_padding_however_it_is_spelled() -> None:
    check(Tokens(WORDS), Tokens([*WORDS, "what"], frozenset({4})))
    check(Tokens([*WORDS, "[PAD4]"]), Tokens([*WORDS, "what"], frozenset({4})))


@pytest.mark.parametrize("token", ["<pad>", "[PAD]", "pad1", "<unused>", "reserved_1", " "])
def test_what_only_looks_like_padding_is_a_token(token: str) -> None:
    with pytest.raises(MismatchError, match="token 4 is missing in the target"):
        check_same_vocabulary(Tokens(WORDS), Tokens([*WORDS, token]))


def test_the_first_id_that_differs_and_both_sizes_are_named() -> None:
    other = ["a", "b", "ba", "<|stop|>", "more"]
    with pytest.raises(MismatchError) as caught:
        check_same_vocabulary(Tokens(WORDS), Tokens(other))
    assert caught.value.message == (
        "the draft model must have the target's vocabulary: the target has 4 tokens, the draft "
        "model 5, and token 2 is 'ab' in the target, 'ba' in the draft model"
    )
    assert "ngram" in (caught.value.hint or "")


def test_a_real_token_in_the_place_of_padding_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"token 4 is '\[PAD4\]' in the target, 'c' in the"):
        check_same_vocabulary(Tokens([*WORDS, "[PAD4]"]), Tokens([*WORDS, "c"]))
