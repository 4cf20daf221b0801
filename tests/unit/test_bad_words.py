"""Words that a reply must not have, in whatever place the vocabulary spells them otherwise."""

from __future__ import annotations

import pytest

from slipstream.engine.check import _bad_words
from tests.recorded_tokenizers import CASES, tokenizer

KINDS = ["byte level gpt-2", "SentencePiece", "Gemma 4"]
WORDS = [
    "hello",
    "Hello",
    "world",
    "the",
    "größte",
    "你好",
    "x1",
    "don't",
    "🙂",
    "▁",
    " the",
    "a b",
]
LEADS = ["", " ", "a ", "(", "\n", "said:\n", '"', "1", "...", "\t", "</b>", "是"]


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_banned_wherever_it_has_tokens_of_its_own(case: str, word: str) -> None:
    found = tokenizer(next(name for name in CASES if name.startswith(case)))
    banned = _bad_words([word], found)
    assert all(banned)
    met = 0
    for lead in LEADS:
        before = found.encode(lead, parse_special=False)
        ids = found.encode(lead + word, parse_special=False)
        if ids[: len(before)] != before:
            continue  # it joins with what is before it, to tokens that are not the word's
        met += 1
        assert tuple(ids[len(before) :]) in banned, lead
    assert met > 3


def test_sentence_piece_spells_a_word_in_mid_text_without_the_space() -> None:
    found = tokenizer("SentencePiece")
    texts = {found.decode(ids) for ids in _bad_words(["hello"], found)}
    assert {" hello", "hello"} <= texts


def test_no_word_bans_nothing() -> None:
    assert _bad_words([], tokenizer("SentencePiece")) == []
