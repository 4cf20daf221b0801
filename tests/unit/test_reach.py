"""A text that is certainly too long is refused unencoded; the bound is never above the truth."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Library

from slipstream.engine.prompt import Conversation, prompt_ids
from slipstream.errors import RequestError
from slipstream.models.loading.json_tokenizer import read_json_tokenizer
from slipstream.models.loading.tokenizer import Tokenizer
from tests.json_tokenizers import byte_level, sentence_piece, write_tokenizer
from tests.recorded_tokenizers import CASES, TEXTS, tokenizer

GGUF = [case for case in CASES if not case.startswith("smollm2")]
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_end|>", "▁", "▁▁▁▁", "\n\n\n", "<0x0A>", "\x00\x01\x7f"]
WORDS = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from(SPECIAL + TEXTS), st.just(" " * 20)), max_size=9
).map("".join)


def bound(found: Tokenizer, text: str) -> int:
    return found.has_more_ids(text, 0)


def is_bounded(found: Tokenizer, text: str) -> bool:
    return all(
        bound(found, text) <= len(found.encode(text, parse_special=special))
        for special in (False, True)
    )


@pytest.mark.parametrize("case", GGUF)
def test_no_gguf_text_has_fewer_ids_than_it_is_said_to_have(case: str) -> None:
    found = tokenizer(case)
    for text in [*TEXTS, "".join(TEXTS), *(16 * text for text in (*found.vocabulary, *SPECIAL))]:
        assert is_bounded(found, text)


@pytest.mark.parametrize("case", ["byte level gpt-2", "SentencePiece", "Gemma 4"])
@given(text=WORDS)
@settings(max_examples=60, deadline=None)
def test_no_drawn_text_has_fewer(case: str, text: str) -> None:
    found = next(tokenizer(name) for name in GGUF if name.startswith(case))
    assert is_bounded(found, text)


def composed() -> Any:
    library = byte_level("qwen2")
    library.normalizer = normalizers.NFC()  # type: ignore[assignment]
    return library


LIBRARIES = {
    "byte level": byte_level("qwen2"),
    "SentencePiece": sentence_piece(),
    "composed": composed(),
}


@pytest.mark.parametrize("name", LIBRARIES)
@given(text=WORDS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_text_of_a_folder_has_fewer(name: str, text: str, tmp_path: Path) -> None:
    found = read_json_tokenizer(write_tokenizer(tmp_path, LIBRARIES[name]), 2000)
    assert is_bounded(found, text)
    assert is_bounded(found, unicodedata.normalize("NFD", text))
    assert bound(found, "x" * 4000) > 0


def test_composition_makes_one_byte_of_four_at_most() -> None:
    # The longest spelling of every character: each part by whatever decomposes to it alone.
    longest: dict[str, int] = {}
    for code in range(0x110000):
        char = chr(code)
        if 0xD800 <= code < 0xE000:
            continue
        apart = unicodedata.normalize("NFD", char)
        if len(apart) == 1:
            longest[apart] = max(longest.get(apart, 0), len(char.encode()))
    for code in range(0x110000):
        if 0xD800 <= code < 0xE000:
            continue
        whole = unicodedata.normalize("NFC", chr(code))
        parts = unicodedata.normalize("NFD", whole)
        spelled = sum(longest.get(part, len(part.encode())) for part in parts)
        assert spelled < 4 * len(whole.encode())


def with_strip() -> Any:
    library = byte_level("qwen2")
    library.add_tokens([AddedToken("<x>", lstrip=True, normalized=False)])
    return library


def normalized() -> Any:
    library = byte_level("qwen2")
    library.normalizer = normalizers.NFKC()  # type: ignore[assignment]
    return library


@pytest.mark.parametrize("library", [with_strip(), normalized()])
def test_what_may_leave_out_text_has_no_bound(library: Library, tmp_path: Path) -> None:
    found = read_json_tokenizer(write_tokenizer(tmp_path, library), 2000)
    for text in ("x" * 4000, " " * 4000, " " * 4000 + "<x>", "ﷺ" * 400):
        assert bound(found, text) == 0


class Template:
    """A template that says what it is told."""

    def render(self, messages: Any, **variables: Any) -> str:
        return "".join(message["content"] for message in messages)


@pytest.mark.parametrize("case", ["byte level gpt-2", "SentencePiece"])
def test_a_text_of_megabytes_is_refused_unencoded(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tokenizer(next(name for name in GGUF if name.startswith(case)))
    text = "A word or two. " * 300_000
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was encoded"))
    for prompt in (text, Conversation(messages=[{"role": "user", "content": text}])):
        with pytest.raises(RequestError) as caught:
            prompt_ids(prompt, found, Template(), max_len=8192)
        error = caught.value
        assert (error.param, error.code) == ("prompt", "context_length_exceeded")
        start = "prompt + 1 token must fit the context of 8192, got a prompt of at least "
        assert error.message.startswith(start)
        assert int(error.message.removeprefix(start)) >= 8192


def test_what_may_fit_is_encoded() -> None:
    found = tokenizer("SentencePiece")
    text = "A word or two. " * 9
    count = len(found.encode(text, parse_special=False))
    for limit in (count - 1, count, count + 1):
        assert len(list(prompt_ids(text, found, None, max_len=limit + 1))) == count
