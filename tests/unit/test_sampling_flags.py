"""Flags of `SamplingParams`: one for each field, one default, refused early where they can be."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.cli.sampling import OTHER_FIELDS, sampling_params, with_sampling_flags
from slipstream.engine.engine import Engine
from slipstream.types import Grammar, SamplingParams
from tests.fake_talker import loader

FIELDS = {item.name: item.default for item in dataclasses.fields(SamplingParams)}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The params of every request that the command line made."""
    for name in list(os.environ):
        if name.startswith("SLIPSTREAM_"):
            monkeypatch.delenv(name)
    module, _ = loader()
    monkeypatch.setitem(sys.modules, "slipstream.engine.load", module)
    params: list[SamplingParams] = []
    check = Engine.check

    def watched(self, prompt, own=None):  # type: ignore[no-untyped-def]
        params.append(own)
        return check(self, prompt, SamplingParams(max_tokens=2))  # whatever was asked for

    monkeypatch.setattr(Engine, "check", watched)
    return params


def flags() -> dict[str, object]:
    """Return the default of each derived flag by its field's name."""

    def command(**settings: object) -> None:
        """Do nothing."""

    signature = inspect.signature(with_sampling_flags(command))
    return {name: p.default for name, p in signature.parameters.items() if name != "settings"}


def test_every_field_has_a_flag_or_a_reason_for_none() -> None:
    derived = set(flags())
    assert derived | set(OTHER_FIELDS) == set(FIELDS)
    assert not derived & set(OTHER_FIELDS)


def test_defaults_are_those_of_the_dataclass() -> None:
    assert sampling_params(dict(flags())) == SamplingParams()


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--max-tokens", "7"], "max_tokens", 7),
        (["--temperature", "0.5"], "temperature", 0.5),
        (["--seed", str(2**64 - 1)], "seed", 2**64 - 1),
        (["--top-p", "0.9"], "top_p", 0.9),
        (["--top-k", "40"], "top_k", 40),
        (["--min-p", "0.05"], "min_p", 0.05),
        (["--repetition-penalty", "1.1"], "repetition_penalty", 1.1),
        (["--presence-penalty", "-0.5"], "presence_penalty", -0.5),
        (["--frequency-penalty", "0.5"], "frequency_penalty", 0.5),
        (["--min-tokens", "3"], "min_tokens", 3),
        (["--stop", "\n\n", "--stop", "END"], "stop", ("\n\n", "END")),
        (["--stop-token-id", "5", "--stop-token-id", "6"], "stop_token_ids", (5, 6)),
        (["--ignore-eos"], "ignore_eos", True),
        (["--logprobs", "3", "--json"], "logprobs", 3),
    ],
)
def test_flags_reach_the_request(
    asked: list[SamplingParams], words: list[str], field: str, value: object
) -> None:
    assert main(["generate", "tiny", "-p", "hi", *words]) == 0
    assert asked == [dataclasses.replace(SamplingParams(), **{field: value})]  # type: ignore[arg-type]


def test_a_grammar_and_a_prediction_reach_the_request(
    asked: list[SamplingParams], tmp_path: Path
) -> None:
    schema, text = tmp_path / "schema.json", tmp_path / "text.txt"
    schema.write_text('{"type": "object"}\n')
    text.write_text("said before\n")
    for words, fields in (
        (["--json-object"], {"grammar": Grammar(kind="json_object")}),
        (
            ["--json-schema", str(schema)],
            {"grammar": Grammar(kind="json_schema", definition='{"type": "object"}\n')},
        ),
        (["--prediction", str(text)], {"prediction": "said before\n"}),
    ):
        assert main(["generate", "tiny", "-p", "hi", *words]) == 0
        assert asked.pop() == SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["--json-schema", "--prediction"])
@pytest.mark.usefixtures("asked")
def test_a_file_that_cannot_be_read_is_named(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for path, message in ((tmp_path / "none", "No such file"), (empty, "is empty")):
        assert main(["generate", "no-such-model", "-p", "hi", flag, str(path)]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert str(path) in err


@pytest.mark.parametrize(
    "words",
    [
        *(["--top-p", "1.5"], ["--top-p", "-1"], ["--min-p", "2"], ["--top-k", "-1"]),
        *(["--temperature", "nan"], ["--temperature", "inf"], ["--presence-penalty", "nan"]),
        *(["--min-tokens", "-1"], ["--stop-token-id", "x"], ["--logprobs", "-1", "--json"]),
        ["--logprobs", "2"],
        ["--json-object", "--json-schema", "schema.json"],
    ],
)
@pytest.mark.usefixtures("asked")
def test_what_a_flag_can_tell_is_refused_before_a_model_is_loaded(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "slipstream.engine.load")
    assert main(["generate", "no-such-model", "-p", "hi", *words]) == 2
    err = capsys.readouterr().err
    assert words[0].strip("-").replace("-", "_") in err.replace("-", "_")


def test_chat_has_the_same_flags_but_for_what_only_json_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    helps = []
    for command in ("generate", "chat"):
        assert main([command, "--help"]) == 0
        helps.append(capsys.readouterr().out)
    for name in flags():
        flag = "--stop-token-id" if name == "stop_token_ids" else "--" + name.replace("_", "-")
        assert all(flag in text for text in helps)
    assert "--logprobs" in helps[0]
    assert "--logprobs" not in helps[1]
