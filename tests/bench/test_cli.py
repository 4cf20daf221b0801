"""`slipstream bench` end to end: the JSON line, the files, refusals and bad flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.record import SCHEMA
from slipstream.cli import main
from tests.gguf_files import real_model, toy_bytes, write

pytest.importorskip("torch", reason="the toy model runs on the reference back end")

CONTRACT = {
    *("requested_k", "mean_drafted", "category", "batch", "tokens", "seconds", "speedup", "ci"),
}


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time forwards and bandwidth as briefly as can be; no test looks at how long they take."""
    monkeypatch.setattr("slipstream.bench.model.CALIBRATION_S", 0.02)
    monkeypatch.setattr("slipstream.bench.benchmark.BANDWIDTH_REPEATS", 1)
    monkeypatch.setattr("slipstream.kernels.bandwidth.BLOCK_BYTES", 1 << 22)


@pytest.fixture
def toy(tmp_path: Path) -> list[str]:
    """The words that bench a model of two layers, with prompts that fit its 128 positions."""
    model = write(tmp_path, toy_bytes())
    asked = tmp_path / "asked.jsonl"
    lines = [
        {"category": category, "turns": [f"{category} {word} {number}"]}
        for category in ("one", "two")
        for number, word in enumerate(("red", "green", "blue"))
    ]
    asked.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return [
        *("bench", str(model), "--workload", str(asked), "--device", "reference"),
        *("--max-tokens", "16", "--batch", "1", "--precision", "100", "--k-values", "2,auto"),
    ]


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(capsys.readouterr().out.rstrip("\n").rpartition("\n")[2])
    return value


def test_the_last_line_is_the_result_and_the_file_has_the_same(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    assert main([*toy, "--json", str(out), "--plot", str(picture), "--allow-misleading"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("bound: ")
    value = json.loads(printed.rstrip("\n").rpartition("\n")[2])
    assert json.loads(out.read_text()) == value
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert value["schema"] == SCHEMA
    assert value["mismatches"] == 0
    assert value["first_mismatch"] is None
    assert {arm["requested_k"] for arm in value["arms"]} == {0, 2, "auto"}
    assert {arm["category"] for arm in value["arms"]} == {"overall", "one", "two"}
    assert all(set(arm) >= CONTRACT for arm in value["arms"])
    made = value["provenance"]
    assert made["workload"]["prompts"] == {"one": 3, "two": 3}
    assert len(made["workload"]["sha256"]) == len(made["model_sha256"]) == 64
    assert made["config"]["device"] == "reference"
    assert len(value["trials"]["rows"]) == 6 * 3 * 2
    assert value["own_share"] < 1


def test_raw_trials_add_up_to_the_rows(toy: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*toy, "--allow-misleading"]) == 0
    value = result(capsys)
    columns = value["trials"]["columns"]
    tokens, arm = columns.index("tokens"), columns.index("arm")
    for index, (name, _) in enumerate(value["trials"]["arms"]):
        own = [row for row in value["trials"]["rows"] if row[arm] == index]
        (overall,) = (
            row
            for row in value["arms"]
            if row["category"] == "overall" and row["name"].split(" ")[0] == name
        )
        assert sum(row[tokens] for row in own) == overall["tokens"]


def test_axes_give_every_combination_with_equal_outputs(
    toy: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    axes = ["--verify-kernel", "auto,tile", "--verify-pad", "off,8", "--tile-m", "4,8"]
    words = [*toy, *axes, "--drafter", "scripted:0.5", "--allow-misleading"]
    assert main(words) == 0
    value = result(capsys)
    variants = {arm["variant"] for arm in value["arms"]}
    assert variants == {
        *("auto, pad off", "auto, pad 8"),
        *("tile 4, pad off", "tile 4, pad 8"),
        "tile 8, pad off",  # eight rows a tile are padded to eight in any case
    }
    assert value["mismatches"] == 0


def test_what_misleads_is_refused_unless_allowed_and_then_marked(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "same.jsonl"
    path.write_text('{"turns": ["ab"]}\n{"turns": ["ab"]}\n')
    words = [*toy, "--workload", str(path)]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "would mislead: prompt 2 (all) repeats prompt 1" in captured.err
    assert "--allow-misleading" in captured.err
    assert captured.out == ""
    assert main([*words, "--allow-misleading"]) == 0
    value = result(capsys)
    assert [warning["kind"] for warning in value["warnings"]][:1] == ["repeated_prompts"]


def test_too_few_tokens_are_refused(toy: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*toy, "--precision", "1"]) == 2
    assert "takes two groups and 38415 tokens" in capsys.readouterr().err


def test_an_output_that_differs_fails_the_run(
    toy: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from slipstream.bench import run as module

    original = module.run_trial

    def tampered(engine: Any, prompts: Any, params: Any, trial: Any, *rest: Any) -> Any:
        done = original(engine, prompts, params, trial, *rest)
        if trial.arm == 2:
            done.token_ids[0][3] += 1
        return done

    monkeypatch.setattr(module, "run_trial", tampered)
    assert main([*toy, "--allow-misleading"]) == 1
    captured = capsys.readouterr()
    assert "auto differs from classic decoding" in captured.err
    assert "token 3 must be" in captured.err
    value = json.loads(captured.out.rstrip("\n").rpartition("\n")[2])
    assert value["mismatches"] == 2
    assert value["first_mismatch"]["position"] == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--k-values", "0"], "must name something to compare"),
        (["--k-values", "16"], "k must be auto, off or in [0, 15], got 16"),
        (["--k-values", "1,,2"], "separated by commas"),
        (["--batch", "0"], "--batch takes numbers in [1, 64], got 0"),
        (["--batch", "x"], "--batch takes numbers"),
        (["--batch", "0000000011111"], "--batch takes numbers"),
        (["--k-values", ""], "separated by commas"),
        (["--prompts", "0"], "--prompts must be in [1, "),
        (["--max-tokens", "1"], "--max-tokens must be in [2, "),
        (["--precision", "nan"], "--precision must be in"),
        (["--time-limit", "0"], "--time-limit must be in"),
        (
            ["--drafter", "none"],
            "--drafter must be auto, ngram, assistant, a path, a model's name or scripted:RATE, "
            "got none",
        ),
        (["--drafter", "scripted:2"], "scripted"),
        (["--verify-kernel", "fast"], "verify_kernel must be one of"),
        (["--verify-pad", "0"], "verify_pad must be auto, off or in"),
        (["--tile-m", "0"], "tile_m must be an integer in"),
        (["--peers", "vllm"], "--peers takes llama.cpp, transformers, openvino, got vllm"),
        (["--categories", "three"], "no category three"),
        (["--workload", "/nowhere"], "cannot read the workload"),
        (["--json", "/nowhere/out.json"], "cannot write /nowhere/out.json"),
        (["--plot", "/nowhere/out.png"], "cannot write /nowhere/out.png"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_run(
    toy: list[str], words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*toy, *words]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_categories_may_have_different_numbers_of_prompts_and_any_name(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.jsonl"
    names = ["[/]", "[/]", "[red]x", "cost $\\frac$", "cost $\\frac$"]
    lines = [{"category": c, "turns": [f"{n} {chr(97 + n) * 5}"]} for n, c in enumerate(names)]
    path.write_text("\n".join(map(json.dumps, lines)))
    picture = tmp_path / "out.png"
    words = [*toy, "--workload", str(path), "--allow-misleading", "--plot", str(picture)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "[/]" in out
    assert "[red]x" in out
    value = json.loads(out.rstrip("\n").rpartition("\n")[2])
    assert value["precision"]["overall"] is None
    assert value["precision"]["without"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_what_cannot_be_written_costs_nothing_else(
    toy: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*toy, "--allow-misleading", flag, "/dev/full"]) == 1
    captured = capsys.readouterr()
    assert "cannot write /dev/full" in captured.err
    assert json.loads(captured.out.rstrip("\n").rpartition("\n")[2])["mismatches"] == 0


def test_one_file_for_both_results_is_refused(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "out")
    assert main([*toy, "--json", path, "--plot", path]) == 2
    assert "must be two files" in capsys.readouterr().err


def test_few_rows_a_forward_are_enough(toy: list[str]) -> None:
    words = ["--max-batch-rows", "8", "--max-num-seqs", "2"]
    assert main([*toy, *words, "--allow-misleading"]) == 0


@pytest.mark.real_model
def test_the_real_model_is_benched_with_equal_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *("bench", str(real_model()), "--quick", "--categories", "math,summarisation"),
        *("--prompts", "2", "--max-tokens", "24", "--batch", "1,2", "--k-values", "3,8,auto"),
    ]
    assert main([*words, "--allow-misleading"]) == 0
    value = result(capsys)
    assert value["mismatches"] == 0
    assert {arm["batch"] for arm in value["arms"]} == {1, 2}
    assert value["bound"]["bandwidth"] > 1e9
    assert all(arm["tokens"] > 0 for arm in value["arms"])


def test_a_picture_of_a_run_that_never_drafted_is_drawn(
    toy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.drafters.ngram import NGramDrafter

    monkeypatch.setattr(NGramDrafter, "propose", lambda *_: [])
    picture = tmp_path / "out.png"
    assert main([*toy, "--plot", str(picture), "--allow-misleading"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
