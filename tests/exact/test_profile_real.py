"""Profiles of the default model: made by one run, read by the next, shown, copied and removed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import slipstream
from slipstream.cli import main
from slipstream.errors import LoadError
from slipstream.models.loading import resolve_model

pytestmark = pytest.mark.real_model

SMALL = {"max_model_len": 128, "max_num_seqs": 1}
FLAGS = ["--max-model-len", "128", "--max-num-seqs", "1"]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The default model's file, with a cache of its own for profiles."""
    try:
        path = resolve_model("smollm2-135m")
    except LoadError as error:
        pytest.skip(error.message)
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("SLIPSTREAM_PROFILE", "on")
    return str(path)


def profiles(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "profiles").glob("*"))


def test_a_second_load_reads_what_the_first_one_kept(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = slipstream.load(model, **SMALL)
    assert first.pairing.profile.startswith("new: ")
    assert not profiles(tmp_path)
    first.close()
    (path,) = profiles(tmp_path)
    assert first.pairing.path == path
    # A busy machine may well be slower than it was: what is tested here is that it is asked.
    asked: list[int] = []
    monkeypatch.setattr(
        "slipstream.engine.load.best_of",
        lambda forwards, rows: asked.append(rows) or first.policy.cost.verify.time_s(rows, 0),  # type: ignore[union-attr,func-returns-value]
    )
    second = slipstream.load(model, **SMALL)
    assert second.pairing.profile == f"read: {path}"
    assert asked == [1, 4]
    assert second.policy is not None
    assert first.policy is not None
    assert second.policy.cost.verify.time_s(8, 0) == first.policy.cost.verify.time_s(8, 0)


def test_a_profile_that_no_longer_holds_is_set_aside_and_replaced_the_second_time(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One busy minute must not cost what a quiet one has measured; two in a row are believed."""
    first = slipstream.load(model, **SMALL)
    assert first.policy is not None
    first.policy.ledger.debt_s = 0.0125
    first.close()
    (path,) = profiles(tmp_path)
    kept = json.loads(path.read_text())["state"]["cost"]
    monkeypatch.setattr("slipstream.engine.load.best_of", lambda forwards, rows: 5.0)
    with caplog.at_level(logging.INFO):
        second = slipstream.load(model, **SMALL)
    assert second.pairing.profile.startswith("set aside, ")
    assert second.policy is not None
    assert second.policy.ledger.debt_s == 0.0125
    assert second.policy.cost.classic.time_s(1, 0) is None
    assert caplog.records[0].getMessage().startswith("the profile is set aside")
    second.close()
    assert json.loads(path.read_text())["state"]["cost"] == kept
    third = slipstream.load(model, **SMALL)
    assert third.pairing.profile.startswith("new: ")
    third.close()
    assert json.loads(path.read_text())["state"]["cost"] != kept


def test_profile_off_reads_and_leaves_nothing(model: str, tmp_path: Path) -> None:
    engine = slipstream.load(model, profile="off", **SMALL)
    engine.generate([[1, 2, 3]])
    engine.close()
    assert engine.pairing.path is None
    assert not (tmp_path / "profiles").exists()


def test_profiles_of_other_settings_are_other_files(model: str, tmp_path: Path) -> None:
    for settings in ({}, {"threads": 1}, {"verify_pad": "8"}):
        slipstream.load(model, **SMALL, **settings).close()
    assert len(profiles(tmp_path)) == 3


def test_measure_show_export_reset(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", model, *FLAGS, "--show"]) == 2
    assert "there is no profile to read" in capsys.readouterr().err
    assert main(["profile", model, *FLAGS]) == 0
    captured = capsys.readouterr()
    rows = [line.split()[0] for line in captured.out.splitlines() if line[:5].strip().isdigit()]
    assert rows == [str(n) for n in range(1, 17)]
    assert "bound at context 0: " in captured.out
    assert "GB/s" in captured.out
    (path,) = profiles(tmp_path)
    assert captured.out.splitlines()[-1] == f"kept in {path}"
    assert main(["profile", model, *FLAGS, "--show"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[:17] == captured.out.splitlines()[:17]
    assert "owed to the loss budget" in shown
    copy = tmp_path / "copy.json"
    assert main(["profile", model, *FLAGS, "--export", str(copy)]) == 0
    assert capsys.readouterr().out == f"{copy}\n"
    assert json.loads(copy.read_text()) == json.loads(path.read_text())
    assert main(["profile", model, *FLAGS, "--reset"]) == 0
    assert capsys.readouterr().out == f"removed {path}\n"
    assert not path.exists()
    assert main(["profile", model, *FLAGS, "--reset"]) == 0
    assert capsys.readouterr().out == f"nothing is kept in {path}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--show", "--reset"], "--show, --reset and --export exclude one another"),
        (["--k", "off"], "there is nothing to measure: nothing is ever drafted"),
        (["--drafter", "none"], "there is nothing to measure: nothing is ever drafted"),
    ],
)
def test_what_makes_no_sense_is_refused(
    model: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["profile", model, *FLAGS, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_costs_no_reply(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profiles").write_text("a file is in the way")
    with slipstream.load(model, **SMALL) as engine:
        assert engine.generate([[1, 2, 3]])[0].token_ids
    assert "the profile cannot be written" in caplog.text


def test_a_recorded_reply_can_be_simulated(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    words = ["--raw", "--max-tokens", "40", "--k", "2", "--record", str(trace)]
    prompt = "1 2 3 4 1 2 3 4 1 2 3 4 1 2 3"
    assert main(["generate", model, "-p", prompt, "--json", *words, *FLAGS]) == 0
    report = json.loads(capsys.readouterr().out)["speculation"]
    (recorded,) = json.loads(trace.read_text())["traces"]
    ks = [entry["k"] for entry in recorded["rounds"]]
    assert {str(k): ks.count(k) for k in set(ks) - {0}} == report["k_histogram"]
    assert ks.count(0) == report["classic_rounds"]
    assert main(["simulate", str(trace), "--json"]) == 0
    (verdict,) = json.loads(capsys.readouterr().out)
    assert [arm["drafted"] for arm in verdict["arms"]] == sorted(set(ks) - {0})


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "trace.json"
    assert main(["generate", model, "-p", "x", "--record", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"cannot write {path}" in captured.err


def test_a_trace_is_written_after_the_reply_and_an_old_file_is_kept_until_then(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.json"
    old.write_text("keep me")
    words = ["generate", model, "-p", "x", "--raw", "--max-tokens", "3", *FLAGS]
    assert main([*words, "--stop-token-id", "99999999", "--record", str(old)]) == 2
    assert old.read_text() == "keep me"
    capsys.readouterr()
    assert main([*words, "--json", "--record", "/dev/full"]) == 1
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["token_ids"]) == 3
    assert "cannot write /dev/full: No space left on device" in captured.err


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-tokens", "16"],
        ["--max-model-len", "3"],
        ["--max-batch-rows", "8", "--max-num-seqs", "1"],
        ["--verify-pad", "256"],
    ],
)
def test_small_pools_contexts_and_steps_are_timed_as_far_as_they_go(
    model: str, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["generate", model, "-p", "a", "--raw", "--max-tokens", "2", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] == 2


def test_measuring_less_forgets_no_more(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A busy machine would set the first profile aside before it is measured again.
    monkeypatch.setattr("slipstream.engine.load.best_of", lambda forwards, rows: None)
    wide = ["--max-model-len", "2048", "--max-num-seqs", "1"]
    assert main(["profile", model, *wide]) == 0
    assert "1024+" in capsys.readouterr().out
    assert main(["profile", model, *FLAGS]) == 0
    assert "1024+" in capsys.readouterr().out


def test_what_could_not_be_kept_is_an_error_of_profile(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profiles").write_text("a file is in the way")
    assert main(["profile", model, *FLAGS]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "kept nowhere"
    assert "what was measured could not be kept" in captured.err
