"""The command line: exit codes, messages, and what goes to which stream."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.cli.view import closing_line
from slipstream.config import EngineConfig
from slipstream.errors import CapacityError, LoadError, RequestError
from slipstream.types import Chunk, Reply, SamplingParams, SpeculationReport, Timing, Usage

REPLY = Reply(
    text="naïve \u2028 line\n",
    token_ids=[5, 6, 7, 2],
    finish_reason="stop",
    seed=17,
    usage=Usage(prompt_tokens=3, completion_tokens=4),
    timing=Timing(load_s=0.1, prefill_s=0.2, decode_s=0.5, decode_tokens_per_s=6.0),
    speculation=SpeculationReport(
        mode="auto",
        drafter="ngram",
        verdict="enable",
        reason="a round of 5.0 ms yields 2.00 tokens",
        requested_k="auto",
        mean_drafted=1.0,
        rounds=1,
        classic_rounds=1,
        drafted=1,
        accepted=1,
        acceptance_length=2.0,
        k_histogram={"1": 1},
        classic_ms=4.0,
        verify_ms=5.0,
        draft_ms=0.1,
        overhead_ms=0.1,
        predicted_speedup=1.5,
        sources={"ngram": {"drafted": 1, "accepted": 1}},
        undrafted={"nothing_offered": 1},
    ),
)


class FakeEngine:
    """Replays one reply, or raises, and remembers what it was asked."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.has_chat_template = True
        self.prompt: Any = None
        self.params = SamplingParams()
        self.config = EngineConfig()
        self.closed = False

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[Chunk]:
        self.prompt, self.params = prompt, params
        try:
            yield Chunk(text="naïve ", token_ids=[5, 6], accepted=0)
            if self.error:
                raise self.error
            yield Chunk(text="\u2028 line\n", token_ids=[7, 2], accepted=1, reply=REPLY)
        finally:
            self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()

    def load(model: str, config: EngineConfig) -> FakeEngine:
        if model != "tiny":
            raise LoadError(f"no model {model}", hint="pull it first")
        fake.config = config
        return fake

    module = ModuleType("slipstream.engine.load")
    module.load = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.engine.load", module)
    for name in list(os.environ):
        if name.startswith("SLIPSTREAM_"):
            monkeypatch.delenv(name)
    return fake


def _stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_text_alone_goes_to_stdout(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "tiny", "-p", "hi"]) == 0
    out, err = capsys.readouterr()
    assert out == REPLY.text
    assert "6.0 tok/s" in err
    assert "acceptance length 2.00" in err
    assert "1 speculative and 1 classic (1 nothing offered)" in err
    assert "enable: a round of 5.0 ms yields 2.00 tokens" in err


def test_json_is_the_only_line_on_stdout(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "tiny", "-p", "hi", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    value = json.loads(lines[0])
    assert list(value) == [
        *("text", "token_ids", "finish_reason", "seed", "usage", "timing", "speculation")
    ]
    assert list(value["usage"]) == ["prompt_tokens", "completion_tokens"]
    assert list(value["timing"]) == ["load_s", "prefill_s", "decode_s", "decode_tokens_per_s"]
    assert list(value["speculation"]) == [
        *("mode", "drafter", "verdict", "reason", "requested_k", "mean_drafted", "rounds"),
        *("classic_rounds", "drafted", "accepted", "acceptance_length", "k_histogram"),
        *("classic_ms", "verify_ms", "draft_ms", "overhead_ms", "predicted_speedup", "sources"),
        "undrafted",
    ]
    assert value["text"] == REPLY.text


def test_sampling_flags_reach_the_engine(engine: FakeEngine) -> None:
    words = ["--max-tokens", "7", "--temperature", "0.5", "--seed", str(2**64 - 1)]
    assert main(["generate", "tiny", "-p", "hi", *words]) == 0
    assert engine.params == SamplingParams(max_tokens=7, temperature=0.5, seed=2**64 - 1)


def test_flag_goes_before_variable_and_variable_before_default(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_THREADS", "3")
    monkeypatch.setenv("SLIPSTREAM_DRAFTER", "none")
    assert main(["generate", "tiny", "-p", "hi", "--k", "4", "--drafter", "ngram"]) == 0
    assert engine.config == EngineConfig(k=4, drafter="ngram", threads=3)


@pytest.mark.parametrize(
    ("flags", "has_template", "messages"),
    [
        ([], True, True),
        ([], False, False),
        (["--raw"], True, False),
        (["--chat"], False, True),
    ],
)
def test_chat_is_the_default_where_a_template_exists(
    engine: FakeEngine, flags: list[str], has_template: bool, messages: bool
) -> None:
    engine.has_chat_template = has_template
    assert main(["generate", "tiny", "-p", "hi", *flags]) == 0
    assert engine.prompt == ([{"role": "user", "content": "hi"}] if messages else "hi")


def test_prompt_from_stdin_is_taken_unchanged(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stdin(monkeypatch, "zwei\r\nZeilen ü\n".encode())
    assert main(["generate", "tiny", "--raw", "--prompt-file", "-"]) == 0
    assert engine.prompt == "zwei\r\nZeilen ü\n"


def test_prompt_from_a_file(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("from a file", encoding="utf-8")
    words = ["generate", "tiny", "--raw", "--prompt-file", str(tmp_path / "prompt.txt")]
    assert main(words) == 0
    assert engine.prompt == "from a file"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "tiny"], "either --prompt or --prompt-file, got neither"),
        (["generate", "tiny", "-p", "a", "--prompt-file", "-"], "got both"),
        (["generate", "tiny", "-p", ""], "the prompt from --prompt is empty"),
        (["generate", "tiny", "-p", "a\0b"], "holds a NUL at character 1"),
        (["generate", "tiny", "-p", "a\udcff"], "the prompt from --prompt is not UTF-8"),
        (["generate", "tiny", "--prompt-file", "/no/such"], "cannot read the prompt"),
        (["generate", "tiny", "-p", "a", "--k", "16"], "k must be auto, off or in [0, 15], got 16"),
        (["generate", "tiny", "-p", "a", "--device", "tpu"], "device must be one of"),
        (["generate", "tiny", "-p", "a", "--max-tokens", "0"], "'--max-tokens'"),
        (["generate", "tiny", "-p", "a", "--max-tokens", "x"], "'--max-tokens'"),
        (["generate", "tiny", "-p", "a", "--temperature", "-1"], "'--temperature'"),
        (["generate", "tiny", "-p", "a", "--temperature", "nan"], "temperature"),
        (["generate", "tiny", "-p", "a", "--seed", "-1"], "'--seed'"),
        (["generate"], "missing argument"),
        (["generate", "tiny", "extra", "-p", "a"], "extra"),
        (["pull"], "missing argument"),
    ],
)
def test_bad_usage_exits_2_with_one_error_line(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err.splitlines()[0]
    assert "Traceback" not in err


@pytest.mark.parametrize("data", [b"", b"caf\xe9", b"a\0b"])
def test_bad_stdin_is_refused(
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: bytes,
) -> None:
    _stdin(monkeypatch, data)
    assert main(["generate", "tiny", "--prompt-file", "-"]) == 2
    assert "error: the prompt from stdin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["generate", "tiny", "--max-token", "3"], "did you mean --max-tokens?"),
        (["generate", "tiny", "--theads=3"], "did you mean --threads?"),
        (["info", "--devise", "cpu"], "did you mean --device?"),
        (["genrate", "tiny"], "did you mean generate?"),
        (["--versoin"], "did you mean --version?"),
        (["--qqqqqqq"], "see slipstream --help"),
    ],
)
def test_unknown_word_names_the_nearest(
    capsys: pytest.CaptureFixture[str], words: list[str], hint: str
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[1] == f"hint: {hint}"


def test_unknown_variable_exits_2(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_THREDS", "3")
    assert main(["generate", "tiny", "-p", "hi"]) == 2
    assert "hint: did you mean SLIPSTREAM_THREADS?" in capsys.readouterr().err


def test_unknown_model_exits_1_with_its_hint(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "huge", "-p", "hi"]) == 1
    assert capsys.readouterr().err == "error: no model huge\nhint: pull it first\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("prompt too long"), 2),
        (CapacityError("no page left"), 1),
        (RuntimeError("boom\nsecond line"), 1),
        (OSError(28, "No space left on device"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 1),
    ],
)
def test_failure_while_streaming_closes_the_stream_and_shows_no_traceback(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    engine.error = error
    assert main(["generate", "tiny", "-p", "hi"]) == code
    assert engine.closed
    err = capsys.readouterr().err
    assert "Traceback" not in err
    quiet = isinstance(error, KeyboardInterrupt | BrokenPipeError)
    assert (err == "") if quiet else err.startswith("error: ")


def test_unexpected_error_says_how_to_see_the_traceback(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.error = RuntimeError("boom")
    assert main(["generate", "tiny", "-p", "hi"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: unexpected RuntimeError: boom"
    assert "--traceback" in second
    assert main(["--traceback", "generate", "tiny", "-p", "hi"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_pull_prints_the_path_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import slipstream.models.loading as loading

    def fetch(name: str, progress: Callable[[str, float], None]) -> Path:
        for part in (0.0, 0.5, 1.0):
            progress("download", part)
        return tmp_path / name

    monkeypatch.setattr(loading, "pull", fetch)
    assert main(["pull", "tiny"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'tiny'}\n"
    assert err == "tiny: download\n"


def test_pull_of_an_unknown_name_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "smollm2-136m"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "hint: did you mean smollm2-135m?" in err


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["generate", "--help"], ["info", "--help"]])
def test_help_goes_to_stdout(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: slipstream")
    assert err == ""


def test_the_list_of_commands_cuts_no_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert len(commands) > 5
    assert all(line.endswith(".") and not line.endswith("...") for line in commands)


def test_every_command_says_what_a_model_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat", "serve", "info", "profile", "bench", "distill"):
        assert main([command, "--help"]) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert all(kind in words for kind in ("pulled model", "GGUF file", "folder", "hub id"))


def test_help_does_not_import_the_engine() -> None:
    program = (
        "import sys; from slipstream.cli import main; main(['generate', '--help'])\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'tokenizers')))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert run.returncode == 0


def test_closed_pipe_is_quiet() -> None:
    program = (
        "import os, sys\nfrom slipstream.cli import main\n"
        "read, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)\n"
        "sys.exit(main(['generate', '--help']))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (run.returncode, run.stderr) == (1, b"")


def test_the_closing_line_says_what_was_gained_and_the_seed_that_was_drawn() -> None:
    report = dataclasses.replace(REPLY.speculation, classic_rounds=5, classic_ms=250.0)
    reply = dataclasses.replace(REPLY, speculation=report)
    assert "4 tokens, 6.0 tok/s, 1.50x its classic steps, " in closing_line(reply)
    assert "seed 17" in closing_line(reply, seed_matters=True)
    assert "seed" not in closing_line(reply)
    few = dataclasses.replace(report, classic_rounds=2)
    assert "its classic steps" not in closing_line(dataclasses.replace(reply, speculation=few))
    one = dataclasses.replace(reply, usage=Usage(prompt_tokens=3, completion_tokens=1))
    assert closing_line(one).startswith("1 token, ")
