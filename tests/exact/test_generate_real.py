"""The default model end to end: what the drafter does never shows in the reply."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.cli import main
from slipstream.errors import LoadError
from slipstream.models.loading import resolve_model
from slipstream.types import KSetting
from tests.tiny import KEPT_VARIABLES

pytestmark = pytest.mark.real_model

NUM_TOKENS = 40
# Asks for a copy, so that the n-gram drafter has hits and misses.
PROMPT = (
    "Repeat the following text word for word.\n\nThe harbour master keeps a log of every ship that "
    "enters the harbour. Each entry in the log names the ship, its captain, its cargo and the hour "
    "at which it entered."
)


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


def _token_ids(model: Path, drafter: str, threads: int, ks: list[KSetting]) -> list[list[int]]:
    config = slipstream.EngineConfig(drafter=drafter, threads=threads, max_model_len=512)
    engine = slipstream.load(model, config)
    prompt = [{"role": "user", "content": PROMPT}]
    params = [slipstream.SamplingParams(max_tokens=NUM_TOKENS, k=k, ignore_eos=True) for k in ks]
    return [reply.token_ids for p in params for reply in engine.generate([prompt], p)]


@pytest.fixture(scope="module")
def classic_ids(model: Path) -> list[int]:
    """The reply of one thread that never drafts."""
    return _token_ids(model, "none", 1, ["off"])[0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_token_ids_do_not_depend_on_drafter_k_or_threads(
    model: Path, classic_ids: list[int], drafter: str, threads: int
) -> None:
    assert len(classic_ids) == NUM_TOKENS
    for token_ids in _token_ids(model, drafter, threads, ["off", 4, "auto"]):
        assert token_ids == classic_ids


def _generate_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    command = ["generate", "smollm2-135m", "-p", PROMPT, "--json", "--max-model-len", "512"]
    assert main([*command, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    value: dict[str, Any] = json.loads(lines[0])
    return value


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("k", ["off", "4"])
def test_json_counts_and_rates_agree(capsys: pytest.CaptureFixture[str], k: str) -> None:
    # Well before the reply's end, so that no round is truncated.
    value = _generate_json(capsys, "--k", k, "--max-tokens", "24", "--seed", "5")
    usage, timing, report = value["usage"], value["timing"], value["speculation"]
    assert value["seed"] == 5
    assert value["finish_reason"] == "length"
    assert usage["completion_tokens"] == len(value["token_ids"]) == 24
    assert 1 + report["accepted"] + report["rounds"] + report["classic_rounds"] == 24
    assert timing["decode_tokens_per_s"] == pytest.approx(23 / timing["decode_s"])
    histogram = {int(width): count for width, count in report["k_histogram"].items()}
    assert sum(histogram.values()) == report["rounds"]
    assert sum(width * count for width, count in histogram.items()) == report["drafted"]
    assert sum(source["drafted"] for source in report["sources"].values()) == report["drafted"]
    assert sum(source["accepted"] for source in report["sources"].values()) == report["accepted"]
    assert report["requested_k"] == (k if k == "off" else int(k))
    if k == "off":
        assert (report["verdict"], report["rounds"], report["acceptance_length"]) == (
            "off",
            0,
            None,
        )
    else:
        assert report["rounds"] > 0
        expected = 1 + report["accepted"] / report["rounds"]
        assert report["acceptance_length"] == pytest.approx(expected)


@pytest.mark.usefixtures("model")
def test_stop_token_ends_the_ids_and_is_not_in_the_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    value = _generate_json(capsys, "--k", "4", "--max-tokens", "200")
    assert value["finish_reason"] == "stop"
    assert value["token_ids"][-1] not in value["token_ids"][:-1]
    assert "<|im_end|>" not in value["text"]
