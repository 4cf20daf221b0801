"""Workloads: what is built in, what files may look like, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.model import Model
from slipstream.bench.refuse import misleading
from slipstream.bench.workload import BUILT_IN, Conversation, Workload, open_workload
from slipstream.errors import ConfigError
from tests.bench.worlds import World, conversation, limits, workload
from tests.fake_model import fake_engine
from tests.gguf_files import real_model


def written(folder: Path, *entries: Any) -> str:
    path = folder / "asked.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in entries), encoding="utf-8")
    return str(path)


def kinds(asked: Workload, **changes: Any) -> list[str]:
    model = Model(fake_engine())
    return [found.kind for found in misleading(asked, model, limits(**changes))]


def test_every_category_has_eight_prompts_and_none_misleads() -> None:
    asked = open_workload("built-in")
    assert list(asked.categories) == list(BUILT_IN)
    assert min(len(own) for own in asked.categories.values()) >= 8
    found = misleading(asked, Model(fake_engine()), limits(max_tokens=128))
    assert [warning for warning in found if warning.kind != "random_tokens"] == []


@pytest.mark.real_model
def test_no_built_in_prompt_is_longer_than_1500_tokens_or_random_to_the_model() -> None:
    model = Model.load(real_model())
    asked = open_workload("built-in")
    for own in asked.conversations:
        ids = model.ids(own.messages(0, []))
        assert len(ids) <= 1500, own.id
    assert misleading(asked, model, limits(max_tokens=128)) == []


@pytest.mark.real_model
def test_random_tokens_are_refused_and_foreign_text_is_not() -> None:
    model = Model.load(real_model())
    words = "".join(
        model.tokenizer.decode([(7919 * n) % 48000 + 100])
        for n in range(60)  # type: ignore[attr-defined]
    )
    polish = "Wczoraj wieczorem poszliśmy nad rzekę, a potem wróciliśmy do domu przez las i pola."
    asked = workload(
        Conversation(id="random", category="all", turns=(words,)),
        Conversation(id="polish", category="all", turns=(polish,)),
    )
    found = misleading(asked, model, limits())
    assert [(one.kind, "prompt random " in one.text) for one in found] == [("random_tokens", True)]


def test_spec_bench_lines_are_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": 3},
        {"question_id": 82, "category": "math", "turns": ["Add."]},
    )
    first, second = open_workload(path).conversations
    assert (first.id, first.category, first.turns) == ("81", "writing", ("Write.", "Again."))
    assert second.category == "math"


def test_openai_messages_are_read_and_recorded_answers_are_not_asked(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ]
    batch = {"custom_id": "x-1", "method": "POST", "body": {"messages": messages}}
    path = written(tmp_path, {"messages": messages}, batch)
    first, second = open_workload(path).conversations
    assert first.turns == second.turns == ("Hello", "Bye")
    assert (first.system, second.id, first.category) == ("Be brief.", "x-1", "all")
    assert first.messages(1, ["made anew"]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "made anew"},
        {"role": "user", "content": "Bye"},
    ]


def test_one_json_list_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([{"turns": ["a"]}, {"turns": ["b"]}], indent=1), encoding="utf-8")
    assert [own.turns for own in open_workload(str(path)).conversations] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "entry 1 must be a JSON object"),
        ('{"turns": []}', "needs `turns`"),
        ('{"turns": ["a", 1]}', "needs `turns`"),
        ('{"turns": ["  "]}', "needs `turns`"),
        ('{"prompt": "a"}', "needs `turns`"),
        ('{"messages": {}}', "must be a list"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "role of system, user, assistant"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "must be text"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "needs `turns`"),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', "role of system, user, assistant"),
        ('{"turns": ["a"], "category": 3}', "category"),
        ('{"turns": ["a"], "category": "overall"}', "no category may be called overall"),
        ('{"turns": ["a"], "id": "a\\u0007"}', "an id of 1 to 80 printable characters"),
        ('{"turns": ["a"], "id": ' + "9" * 5000 + "}", "line 1 is not JSON"),
        ('{"turns": ["a\\ud800"]}', "lone surrogate"),
        ('{"turns": ["a"], "category": "a\\u001b[0m"}', "category"),
        ("\n\n", "asks nothing"),
        ("[]", "asks nothing"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        open_workload(str(path))


def test_a_missing_file_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read") as caught:
        open_workload(str(tmp_path / "none"))
    assert "built-in" in str(caught.value.hint)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        open_workload(str(tmp_path / "bytes"))


def test_a_byte_order_mark_and_a_null_id_are_nothing_special(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"turns": ["a"], "id": null}\r\n')
    assert [own.id for own in open_workload(str(path)).conversations] == ["1"]


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file"):
        open_workload(str(tmp_path))


def test_a_category_named_twice_is_one(tmp_path: Path) -> None:
    once = open_workload("built-in").limited(3, ["chat"])
    assert open_workload("built-in").limited(3, ["chat", "chat"]) == once


def test_an_unknown_category_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="no category poems in built-in; it has chat"):
        open_workload("built-in").limited(3, ["poems"])


def test_the_hash_tells_workloads_apart() -> None:
    asked = open_workload("built-in")
    assert asked.sha256 == open_workload("built-in").sha256
    assert asked.sha256 != asked.limited(3).sha256


def test_the_same_prompt_twice_is_refused_also_with_other_spaces_and_capitals() -> None:
    text = "Tell me a story about a fox that learned to sing in the rain."
    asked = workload(
        Conversation(id="1", category="all", turns=(text,)),
        Conversation(id="2", category="other", turns=(text.upper().replace(" ", "\n"),)),
    )
    assert "repeated_prompts" in kinds(asked)


def test_one_prompt_as_both_turns_of_a_conversation_is_refused() -> None:
    text = "Tell me a story about a fox that learned to sing in the rain."
    asked = workload(
        Conversation(id="1", category="all", turns=(text, text)), conversation(2), conversation(3)
    )
    assert "repeated_prompts" in kinds(asked)


def test_scripts_without_spaces_are_compared_by_character() -> None:
    text = "昨日の夜、川のそばを歩いてから森を通って家に帰りました。"
    asked = workload(
        Conversation(id="1", category="all", turns=(text,)),
        Conversation(id="2", category="all", turns=(text + "短く。",)),
    )
    assert "repeated_prompts" in kinds(asked)
    asked = workload(Conversation(id="1", category="all", turns=(text * 8,)), conversation(2))
    assert "self_repeating_prompt" in kinds(asked)


def test_different_texts_behind_one_instruction_are_different_prompts() -> None:
    instruction = (
        "Read the review below and say in one word whether its writer liked the product, then give "
        "the sentence that shows it best, word for word, and nothing else at all."
    )
    reviews = (
        "The kettle boils fast, but its handle gets so hot that I burned my hand twice in a week. "
        "The shop would not take it back, and the lid never closed the way it should have done.",
        "My neighbour lent me this drill for a weekend and I bought one then. It is quiet, the "
        "battery lasts through a whole kitchen, and even old concrete gave no trouble so far.",
    )
    asked = workload(
        *(
            Conversation(id=str(n), category="all", turns=(f"{instruction} {review}",))
            for n, review in enumerate(reviews)
        )
    )
    assert "repeated_prompts" not in kinds(asked)
    short = [f"Translate the following sentence into French: {word}" for word in ("Hello", "Bye")]
    asked = workload(*(Conversation(id=text, category="all", turns=(text,)) for text in short))
    assert "repeated_prompts" not in kinds(asked)


def test_short_prompts_are_compared_whole() -> None:
    one = Conversation(id="1", category="all", turns=("Hello there",))
    assert "repeated_prompts" in kinds(workload(one, Conversation(**vars(one) | {"id": "2"})))
    other = Conversation(id="2", category="all", turns=("Hello you",))
    assert "repeated_prompts" not in kinds(workload(one, other))


def test_a_long_prompt_with_another_ending_is_the_same_prompt() -> None:
    words = [f"word{n}" for n in range(200)]
    asked = workload(
        Conversation(id="1", category="all", turns=(" ".join(words),)),
        Conversation(id="2", category="all", turns=(" ".join([*words, "Be", "brief."]),)),
    )
    assert "repeated_prompts" in kinds(asked)


def test_a_prompt_that_says_one_thing_again_and_again_is_refused() -> None:
    text = "The quick brown fox jumps over the lazy dog near the river bank. " * 12
    asked = workload(Conversation(id="1", category="all", turns=(text,)), conversation(2))
    assert "self_repeating_prompt" in kinds(asked)


def test_too_few_tokens_for_the_precision_are_refused() -> None:
    asked = workload(*map(conversation, range(4)))
    needed = 1537  # (1.96 / 0.05) ** 2
    assert "too_few_tokens" in kinds(asked, precision=0.05, max_tokens=needed // 4 - 1)
    assert "too_few_tokens" not in kinds(asked, precision=0.05, max_tokens=needed // 4 + 1)


def test_a_single_group_has_no_interval_and_is_refused() -> None:
    assert "too_few_tokens" in kinds(workload(conversation(1)), max_tokens=10_000)
    asked = workload(*map(conversation, range(4)))
    assert "too_few_tokens" in kinds(asked, batches=(4,), max_tokens=10_000)


def test_fake_worlds_are_workloads_too() -> None:
    assert World().model.ids("abc")
