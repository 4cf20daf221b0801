"""`slipstream distill` from a model file to a checkpoint, at toy size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from slipstream.cli import main  # noqa: E402
from slipstream.errors import ConfigError, LoadError  # noqa: E402
from slipstream.models.loading import open_model  # noqa: E402
from slipstream.models.loading.assistant import read_assistant  # noqa: E402
from slipstream.train.checkpoint import load_state, save_state  # noqa: E402
from slipstream.train.corpus import read_shard  # noqa: E402
from slipstream.train.distill import Distillation, check_out  # noqa: E402
from slipstream.train.recipe import Recipe  # noqa: E402
from slipstream.train.trainer import Trainer, held_out  # noqa: E402
from slipstream.train.turns import read_script, user_frame, whole_turn  # noqa: E402
from tests.families import family_arch  # noqa: E402
from tests.gguf_files import F32, gguf_bytes, toy_entries, toy_metadata, write  # noqa: E402

FLAGS = {
    "shards": 4,
    "conversations": 10,
    "length": 64,
    "steps": 6,
    "batch_tokens": 128,
    "draft_vocab_size": 100,
    "kv_layers": "0,1",
}
RECIPE = Recipe(**FLAGS)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model with random weights, a tokenizer and a chat template."""
    random = np.random.default_rng(0)
    entries = []
    for entry in toy_entries(F32):
        gain = 1.0 if len(entry.dims) == 1 else 2 / entry.dims[0] ** 0.5
        values = random.standard_normal(int(np.prod(entry.dims)), np.float32) * np.float32(gain)
        values = np.ones_like(values) if len(entry.dims) == 1 else values
        entries.append(dataclasses.replace(entry, data=values.tobytes()))
    metadata = toy_metadata(llama__context_length=1024)
    return write(tmp_path_factory.mktemp("model"), gguf_bytes(metadata, entries))


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's conversations."""
    folder = tmp_path_factory.mktemp("data")
    run = Distillation(
        open_model(model), RECIPE, folder / "out", device="cpu", data=folder / "data"
    )
    run.write_text(lambda stage, part: None)
    return folder / "data"


def words(model: Path, out: Path, *more: str, **changes: object) -> list[str]:
    flags = FLAGS | changes
    given = [word for name in flags for word in (f"--{name.replace('_', '-')}", str(flags[name]))]
    return ["distill", str(model), "--out", str(out), "--device", "cpu", *given, *more]


@pytest.mark.slow
def test_a_checkpoint_comes_out_that_fits_its_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(words(model, out)) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == str(out)
    assert "held-out replies: acceptance length" in captured.out
    assert "step 6: loss" in captured.err
    file = open_model(model)
    found = read_assistant(out, file.arch, file.fingerprint)
    assert found.config.kv_layers == (0, 1)
    assert found.config.bits == 4
    assert len(found.vocab_map) == 100
    assert file.tokenizer.eos_id in found.vocab_map
    training = json.loads((out / "config.json").read_text())["training"]
    assert training["finished"] is True
    assert training["recipe"] == dataclasses.asdict(RECIPE)


@pytest.mark.slow
def test_a_lean_head_with_clusters_comes_out_as_asked(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words(model, tmp_path, "--data", str(data), "--lean", clusters=20, top_clusters=3)
    assert main(asked) == 0
    assert "held-out replies: acceptance length" in capsys.readouterr().out
    file = open_model(model)
    found = read_assistant(tmp_path, file.arch, file.fingerprint)
    assert found.clusters is not None
    assert found.clusters.top == 3
    assert (np.bincount(found.clusters.members) == 5).all()
    assert found.tensors["centroids"].shape[0] == 20
    assert not found.tensors.keys() & {"embed.weight", "embed.norm", "post"}
    assert found.head.embedding_scale > 0


def test_a_run_that_is_stopped_goes_on_as_if_it_had_not(
    model: Path, data: Path, tmp_path: Path
) -> None:
    def run(out: Path, stop_at: int | None) -> None:
        def check(trainer: Trainer) -> None:
            if trainer.step == stop_at:
                raise KeyboardInterrupt

        made = Distillation(open_model(model), RECIPE, out, device="cpu", data=data)
        made.train(lambda stage, part: None, check)

    run(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", 4)
    stopped = json.loads((tmp_path / "parts" / "config.json").read_text())["training"]
    assert stopped["finished"] is False
    run(tmp_path / "parts", None)
    for name in ("config.json", "model.safetensors"):
        whole, parts = ((tmp_path / out / name).read_bytes() for out in ("whole", "parts"))
        assert whole == parts, name


def test_text_is_a_function_of_the_seed_and_shards_that_are_there_stay(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted(path.name for path in data.iterdir())
    assert names == [f"shard-0-{number:04}.safetensors" for number in range(4)]
    (tmp_path / names[0]).write_bytes((data / names[0]).read_bytes())
    stamp = (tmp_path / names[0]).stat().st_mtime_ns
    again = words(model, tmp_path / "out", "--data", str(tmp_path), "--stage", "data")
    assert main(again) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert (tmp_path / names[0]).stat().st_mtime_ns == stamp
    for name in names:
        assert (tmp_path / name).read_bytes() == (data / name).read_bytes()
    assert not (tmp_path / "out" / "config.json").exists()


def test_copies_are_answered_with_what_earlier_replies_say(model: Path, data: Path) -> None:
    shard = read_shard(data / "shard-0-0003.safetensors")
    assert tuple(shard.ids.shape) == (5, 128)
    assert 0 < shard.replies.float().mean() < 0.9
    assert (shard.temperatures == 1).all()


def test_answers_begin_behind_a_long_request_and_go_on(model: Path, data: Path) -> None:
    shard = read_shard(data / "shard-0-0002.safetensors")
    assert tuple(shard.ids.shape) == (5, 128)
    script = read_script(open_model(model))
    for ids, replies in zip(shard.ids.tolist(), shard.replies.tolist(), strict=True):
        first = replies.index(True)
        assert first > 0.8 * 64  # and there is a first: room is left for a reply
        assert tuple(ids[first - len(script.to_reply) : first]) == script.to_reply


@pytest.mark.slow
def test_training_lowers_the_loss(model: Path, data: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, steps=120, batch_tokens=256, quantize_from=1.0)
    run = Distillation(open_model(model), recipe, tmp_path, device="cpu", data=data)
    history = run.train(lambda stage, part: None, lambda trainer: None).history
    assert len(history) == 10
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]


def test_prompts_are_judged_at_both_temperatures(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text(
        "".join(
            json.dumps({"question_id": i, "category": name, "turns": ["say it"]}) + "\n"
            for i, name in enumerate(("one", "two", "two"))
        )
    )
    more = ("--data", str(data), "--prompts", str(asked), "--json")
    assert main(words(model, tmp_path / "out", *more, max_k=3)) == 0
    result = json.loads(capsys.readouterr().out)
    assert [item["temperature"] for item in result["prompts"]] == [0.0, 1.0]
    for item in result["prompts"]:
        assert set(item["categories"]) == {"one", "two"}
        assert set(item["overall"]) == {"1", "2", "3"}
        for own in item["categories"].values():
            assert sum(own["3"]) > 0
            assert len(own["3"]) == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--stage", "some"), "stage must be one of all, data, got some"),
        (("--device", "tpu"), "device must be one of auto, cpu, cuda, got tpu"),
        (("--kv-layers", "5"), "kv_layers must be in [0, 1], got [5]"),
        (("--bits", "5"), "bits must be 0, 4 or 8, got 5"),
    ],
)
def test_bad_usage_exits_2_before_anything_is_written(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    message: str,
) -> None:
    out = tmp_path / "out"
    assert main([*words(model, out), *more]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_a_family_that_is_not_trained_is_refused_before_anything_is_read_or_written(
    tmp_path: Path, family: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(LoadError, match="distillation does not run"):
        check_out(out, RECIPE, family_arch(family))
    assert not out.exists()


def test_another_recipe_in_the_same_folder_is_refused(model: Path, tmp_path: Path) -> None:
    arch = open_model(model).arch
    check_out(tmp_path, RECIPE, arch)
    check_out(tmp_path, RECIPE, arch)
    with pytest.raises(ConfigError, match="holds a run with steps 6, not 7"):
        check_out(tmp_path, dataclasses.replace(RECIPE, steps=7), arch)


def test_a_damaged_shard_or_state_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(LoadError, match=r"x\.safetensors cannot be read"):
        read_shard(path)
    with pytest.raises(LoadError, match=r"x\.safetensors cannot be read"):
        load_state(path)
    assert load_state(tmp_path / "none") is None
    save_state(path, {"a": torch.ones(2)}, {"step": 3})
    tensors, progress = load_state(path) or ({}, {})
    assert (tensors["a"].tolist(), progress) == ([1, 1], {"step": 3})


def test_turns_are_what_the_template_puts_between_them(model: Path) -> None:
    file = open_model(model)
    script = read_script(file)
    spell = file.tokenizer.encode
    to_reply = spell("<|im_end|>\n<|im_start|>assistant\n", parse_special=True)
    assert list(script.to_reply) == to_reply
    assert list(script.to_user) == spell("<|im_end|>\n<|im_start|>user\n", parse_special=True)
    assert script.stop_ids == {2}
    assert script.banned_ids == (0, 1)
    before, after = user_frame(file)
    whole = whole_turn(file, [{"role": "user", "content": "hello"}])
    assert whole == spell(before + "hello" + after, parse_special=True)


def test_a_model_without_a_template_is_refused(model: Path) -> None:
    file = dataclasses.replace(open_model(model), template=None)
    with pytest.raises(LoadError, match="the model has no chat template"):
        read_script(file)


def test_some_conversations_of_each_shard_are_held_out(data: Path) -> None:
    shard = read_shard(data / "shard-0-0000.safetensors")
    assert held_out(shard) == 1
