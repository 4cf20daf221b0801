"""chat and generate on the default model: what is printed is what the engine says."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream.cli import main
from slipstream.errors import LoadError
from slipstream.models.loading import resolve_model
from tests.tiny import KEPT_VARIABLES

pytestmark = pytest.mark.real_model

TURNS = ("Repeat after me: the cat sat on the mat, the cat sat on the hat.", "Say that again.")


@pytest.fixture(scope="module")
def model() -> Path:
    """The default model's file."""
    try:
        return resolve_model("smollm2-135m")
    except LoadError as error:
        pytest.skip(error.message)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLIPSTREAM_") and name not in KEPT_VARIABLES:
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def engine(model: Path) -> slipstream.Engine:
    config = slipstream.EngineConfig(k="off", prefix_cache="off", max_model_len=512)
    return slipstream.load(model, config)


@pytest.mark.parametrize(
    ("words", "params"),
    [
        ([], {}),
        (["--k", "8"], {}),
        (["--temperature", "0.9", "--top-p", "0.9", "--seed", "3"], {"top_p": 0.9, "seed": 3}),
    ],
)
def test_a_piped_chat_prints_the_replies_to_the_growing_conversation(
    engine: slipstream.Engine,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    params: dict[str, float],
) -> None:
    # The reference drafts nothing and caches no prefix; the chat does both.
    temperature = 0.9 if params else 0.0
    asked = slipstream.SamplingParams(max_tokens=24, temperature=temperature, **params)  # type: ignore[arg-type]
    messages: list[dict[str, str]] = []
    expected = ""
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        (reply,) = engine.generate([messages], asked)
        messages.append({"role": "assistant", "content": reply.text})
        expected += reply.text + ("" if reply.text.endswith("\n") else "\n")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(TURNS).encode())))
    command = ["chat", "smollm2-135m", "--max-model-len", "512", "--max-tokens", "24"]
    assert main([*command, *words]) == 0
    out, err = capfd.readouterr()
    assert out == expected
    assert err.count("tok/s") == len(TURNS)


@pytest.mark.usefixtures("model")
def test_json_reports_one_named_log_probability_per_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--max-model-len", "128", "--max-tokens", "8", "--json", "--logprobs", "2"]
    assert main(["generate", "smollm2-135m", "-p", TURNS[0], *words]) == 0
    value = json.loads(capsys.readouterr().out)
    assert len(value["logprobs"]) == len(value["token_ids"]) == 8
    for entry, token_id in zip(value["logprobs"], value["token_ids"], strict=True):
        assert list(entry) == ["logprob", "top", "rank"]
        assert entry["rank"] == 1  # greedy
        assert entry["top"][0] == [token_id, entry["logprob"]]
        assert len(entry["top"]) == 2


@pytest.mark.usefixtures("model")
def test_a_stop_text_ends_the_reply_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--max-model-len", "128", "--max-tokens", "24", "--stop", " mat"]
    assert main(["generate", "smollm2-135m", "-p", TURNS[0], *words]) == 0
    assert capsys.readouterr().out == "The cat sat on the"
