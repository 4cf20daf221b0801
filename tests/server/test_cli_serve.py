"""`slipstream serve` before it serves: what is wrong is said at once, with exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config import EngineConfig, ServerConfig
from slipstream.engine.engine import Engine
from slipstream.server import run
from tests.fake_talker import talker
from tests.tiny import KEPT_VARIABLES


class Served:
    """Stands for the server, and remembers what it was made of."""

    last: Any = None

    def __init__(self, engine: Any, sock: Any, config: ServerConfig, model: str) -> None:
        self.engine, self.sock, self.config, self.model = engine, sock, config, model
        Served.last = self

    def run(self, ready: Any) -> None:
        ready()
        self.sock.close()


def load(model: str, config: EngineConfig) -> Engine:
    """Return a fake engine; `loaded` keeps its config."""
    loaded.append(config)
    return talker(config)


loaded: list[EngineConfig] = []


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = ModuleType("slipstream.engine.load")
    module.load = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.engine.load", module)
    monkeypatch.setattr(run, "HttpServer", Served)
    for name in list(os.environ):
        if name.startswith("SLIPSTREAM_") and name not in KEPT_VARIABLES:
            monkeypatch.delenv(name)
    return module


def test_flags_and_variables_reach_server_and_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "secret")
    speculative = '{"method": "ngram", "num_speculative_tokens": 2}'
    words = ["serve", "tiny", "--port", "0", "--max-num-seqs", "3", "--max-queue", "7"]
    assert main([*words, "--speculative-config", speculative]) == 0
    assert Served.last.model == "tiny"
    assert (Served.last.config.api_key, Served.last.config.max_queue) == ("secret", 7)
    assert (loaded[-1].max_num_seqs, loaded[-1].max_k) == (3, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("serving tiny on http://127.0.0.1:")


def test_a_folder_is_served_under_its_name_wherever_one_stands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "a-model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for model in (".", "../a-model/", str(folder)):
        assert main(["serve", model, "--port", "0"]) == 0
        assert Served.last.model == "a-model"


def test_an_open_address_without_a_key_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "tiny", "--port", "0", "--host", "0.0.0.0"]) == 0
    assert "warning: 0.0.0.0" in capsys.readouterr().err
    assert main(["serve", "tiny", "--port", "0", "--host", "0.0.0.0", "--api-key", "k"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "99999"], "port must be an integer in [0, 65535]"),
        (["--prot", "80"], "hint: did you mean --port?"),
        (["--api-key", ""], "api_key must not be empty"),
        (["--api-key", "sesame\x07"], "api_key must be printable ASCII text without spaces"),
        (["--api-key", "open sesame"], "api_key must be printable ASCII text without spaces"),
        (["--api-key", "  "], "api_key must not be empty"),
        (["--k", "4", "--max-k", "2"], "k must be in [0, max_k]"),
        (
            ["--drafter", "none", "--speculative-config", '{"method": "ngram"}'],
            "give either --drafter or --speculative-config",
        ),
        (["--speculative-config", '{"metod": "ngram"}'], "did you mean method?"),
        (["--speculative-config", ""], "speculative_config must not be empty"),
        (["--speculative-config", "ngram"], "speculative_config must be JSON, got ngram"),
        (
            ["--max-k", "3", "--speculative-config", '{"num_speculative_tokens": 4}'],
            "give either --max-k or --speculative-config",
        ),
        (
            ["--k", "4", "--speculative-config", '{"num_speculative_tokens": 2}'],
            "k must be in [0, max_k]",
        ),
        (["--host", "no-such-host.invalid"], "cannot listen on no-such-host.invalid"),
        (["--record", "/no/such/folder/trace.json"], "cannot write"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    words: list[str], message: str, engine: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("loaded")

    engine.load = load  # type: ignore[attr-defined]
    assert main(["serve", "tiny", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "sesame" not in said  # a key is nobody else's business


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import slipstream.server

    monkeypatch.delattr(slipstream.server, "run")
    monkeypatch.setitem(sys.modules, "slipstream.server.run", None)
    assert main(["serve", "tiny"]) == 1
    assert "pip install 'slipstream[server]'" in capsys.readouterr().err
