"""An assistant beside the real model: read from a folder, invisible in text, refused if foreign."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import slipstream
from slipstream.errors import ConfigError, LoadError, MismatchError
from slipstream.models.loading import open_model, resolve_model
from slipstream.models.loading.assistant_config import CONFIG_FILE
from slipstream.types import SamplingParams
from tests.assistants import write_random_assistant

pytestmark = pytest.mark.real_model

PROMPTS = (
    "The harbour master keeps a log of every ship that enters the harbour.",
    "def fibonacci(n):",
)
CONFIG = slipstream.EngineConfig(max_model_len=256, max_num_seqs=4)


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return resolve_model("smollm2-135m")
    except LoadError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def assistant(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head of about the shipped one's shape."""
    file = open_model(model)
    return write_random_assistant(
        tmp_path_factory.mktemp("assistant"),
        file.arch,
        file.fingerprint,
        hidden_size=576,
        ffn_size=1536,
        feature_layers=(10, 20, 30),
        kv_layers=(20, 29),
        draft_vocab_size=8190,
    )


def texts(engine: slipstream.Engine, **params: object) -> list[list[int]]:
    asked = SamplingParams(max_tokens=48, ignore_eos=True, **params)  # type: ignore[arg-type]
    return [reply.token_ids for reply in engine.generate(list(PROMPTS), asked)]


def test_text_does_not_depend_on_an_assistant(model: Path, assistant: Path) -> None:
    with (
        slipstream.load(model, CONFIG, drafter="none") as classic,
        slipstream.load(model, CONFIG, drafter=str(assistant), k=4) as drafting,
    ):
        for params in ({}, {"temperature": 0.8, "seed": 5}):
            assert texts(drafting, **params) == texts(classic, **params)
        head = drafting.target.head
        assert head is not None
        assert not head.declined
        (reply,) = drafting.generate([PROMPTS[0]], SamplingParams(max_tokens=8, ignore_eos=True))
        assert reply.speculation.drafter == "assistant"
        assert reply.speculation.drafted > 0


def test_a_paid_drafter_is_timed_before_the_first_request(model: Path, assistant: Path) -> None:
    with slipstream.load(model, CONFIG, drafter=str(assistant)) as engine:
        assert engine.policy is not None
        times = engine.policy.cost.drafting.times(1)
        assert all(times[k] > 0 for k in range(1, 9))


def test_an_assistant_of_another_model_is_refused_with_both_values(
    model: Path, assistant: Path, tmp_path: Path
) -> None:
    for name in assistant.iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    config["target"]["hash"] = "0" * 32
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(MismatchError, match=f"{'0' * 32}.*{open_model(model).fingerprint}"):
        slipstream.load(model, CONFIG, drafter=str(tmp_path))


def test_what_cannot_be_loaded_says_so(model: Path, assistant: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json is missing"):
        slipstream.load(model, CONFIG, drafter=str(tmp_path))
    with pytest.raises(ConfigError, match=r"k must be in \[0, 8\] with this drafter, got 12"):
        slipstream.load(model, CONFIG, drafter=str(assistant), k=12)
    with pytest.raises(ConfigError, match=r"drafter must be .* or a model's name, got assistent"):
        slipstream.load(model, CONFIG, drafter="assistent")
