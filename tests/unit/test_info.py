"""`slipstream info`: stable keys, and byte counts that are what the engine holds."""

from __future__ import annotations

import json
import os

import pytest

from slipstream.cli import main
from slipstream.errors import LoadError
from slipstream.kernels.ops import PAGE_SIZE
from slipstream.models.loading import resolve_model
from tests.tiny import KEPT_VARIABLES

MACHINE_KEYS = ["version", "device", "device_reason", "isa", "threads", "usable_cores"]
MODEL_KEYS = [
    *("model", "name", "fingerprint", "chat_template", "architecture", "layers", "hidden_size"),
    *("vocabulary", "trained_context", "context", "max_num_seqs", "weights_bytes"),
    "drafter_bytes",
    *("kv_bytes_per_token", "kv_bytes_per_context", "kv_tokens", "kv_bytes", "scratch_bytes"),
    *("total_bytes", "limit_bytes", "drafter", "drafter_max_k", "k", "k_reason", "profile"),
    "load_s",
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLIPSTREAM_") and name not in KEPT_VARIABLES:
            monkeypatch.delenv(name)


@pytest.fixture
def model() -> str:
    try:
        return str(resolve_model("smollm2-135m"))
    except LoadError as error:
        pytest.skip(error.message)


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["info", *words, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    value: dict[str, object] = json.loads(out)
    return value


def test_the_machine_alone_has_stable_keys_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    value = facts(capsys)
    assert list(value) == MACHINE_KEYS
    assert str(value["device_reason"]).startswith("auto: ")


def test_lines_say_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = facts(capsys)
    assert main(["info"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines == {key: "-" if fact is None else str(fact) for key, fact in value.items()}


def test_the_reference_says_that_it_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the reference back end needs torch")
    value = facts(capsys, "--device", "reference")
    assert value["device"] == "reference"
    assert value["device_reason"] == "reference: asked for"
    assert value["isa"] is None


@pytest.mark.real_model
def test_a_model_has_stable_keys_and_a_plan_that_adds_up(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = facts(capsys, model, "--max-model-len", "512", "--kv-tokens", "1024", "--threads", "1")
    assert list(value) == MACHINE_KEYS + MODEL_KEYS
    assert value["threads"] == 1
    assert value["model"] == model
    assert value["context"] == 512
    assert value["kv_tokens"] == 1024
    # SmolLM2-135M: keys and values of 30 layers, 3 heads of 64 columns, in fp16.
    assert value["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert value["kv_bytes_per_context"] == 512 * 23040
    assert value["kv_bytes"] == 1024 * 23040
    scratch = value["scratch_bytes"] or 0
    parts = ("weights_bytes", "drafter_bytes", "kv_bytes")
    assert value["total_bytes"] == sum(value[part] for part in parts) + scratch  # type: ignore[misc,operator]
    assert value["drafter_bytes"] > 0  # type: ignore[operator]
    alone = facts(capsys, model, "--max-model-len", "512", "--drafter", "none", "--threads", "1")
    assert alone["weights_bytes"] == value["weights_bytes"]
    assert alone["drafter_bytes"] == 0
    if value["device"] == "cpu":
        assert 0 < value["weights_bytes"] <= 1.1 * os.path.getsize(model)  # type: ignore[operator]
    assert 1024 % PAGE_SIZE == 0


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("words", "drafter", "k", "reason"),
    [
        ([], "ngram+assistant", "auto", "auto: every round is sized"),
        (["--k", "3"], "ngram+assistant", 3, "fixed: k = 3 was asked for"),
        (["--k", "off"], "ngram+assistant", "off", "off: no drafting was asked for"),
        (["--drafter", "none"], "none", "auto", "off: there is no drafter"),
    ],
)
def test_the_pairing_says_what_k_means_now(
    model: str,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    drafter: str,
    k: object,
    reason: str,
) -> None:
    value = facts(capsys, model, "--max-model-len", "64", *words)
    assert (value["drafter"], value["k"]) == (drafter, k)
    assert str(value["k_reason"]).startswith(reason)
    drafts = drafter != "none" and k != "off"
    assert str(value["profile"]).startswith("new: " if drafts else "none: nothing drafts")
