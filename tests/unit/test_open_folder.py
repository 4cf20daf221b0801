"""A folder opens whole, an MLX one too: tokenizer, template, weights, and the text they make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import slipstream
from slipstream.bench.provenance import provenance
from slipstream.errors import LoadError
from slipstream.models.loading import open_model
from slipstream.models.loading.folder import MODEL_TYPES
from slipstream.models.loading.keys import Keys
from slipstream.models.loading.names import resolve_model
from tests.families import CONFIGS, folder_name, random_weights
from tests.json_tokenizers import VOCABULARIES, byte_level, write_tokenizer
from tests.mlx_files import write_mlx
from tests.safetensors_files import safetensors_bytes

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>"
)
VOCAB = len(VOCABULARIES["byte level"]["tokens"]) + 4  # rows to spare
CONFIG = CONFIGS["llama 2"] | {"vocab_size": VOCAB}
QUANTIZATION = {"group_size": 32, "bits": 4, "lm_head": {"group_size": 64, "bits": 8}}


def write(folder: Path) -> Path:
    """An MLX folder and, beside it, a dense one of the same values."""
    arch = MODEL_TYPES["llama"].describe(Keys(CONFIG))
    names = MODEL_TYPES["llama"].layer_names
    weights = {folder_name(role, names): w for role, w in random_weights(arch).items()}
    means = write_mlx(folder / "mlx", weights, QUANTIZATION, config=CONFIG)
    (folder / "dense").mkdir()
    dense = safetensors_bytes({name: ("F32", values) for name, values in means.items()})
    (folder / "dense" / "model.safetensors").write_bytes(dense)
    (folder / "dense" / "config.json").write_text(json.dumps(CONFIG))
    for name in ("mlx", "dense"):
        write_tokenizer(folder / name, byte_level("llama-bpe", adds_bos=True))
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("folders"))


def test_all_of_a_folder_is_at_hand(folders: Path) -> None:
    model = open_model(folders / "mlx")
    assert (model.name, model.arch.vocab_size) == ("mlx", VOCAB)
    assert model.tokenizer.vocab_size == VOCAB
    assert model.template is not None
    prompt = model.template.render([{"role": "user", "content": "<s>"}])
    ids = model.tokenizer.encode(prompt, parse_special=True)
    assert ids[:2] == [1, 3]
    assert model.fingerprint != open_model(folders / "dense").fingerprint


def test_text_is_that_of_the_values_themselves(folders: Path) -> None:
    texts = []
    for name in ("mlx", "dense"):
        engine = slipstream.load(
            folders / name, device="reference", drafter="none", profile="off", max_model_len=64
        )
        params = slipstream.SamplingParams(max_tokens=12)
        (reply,) = engine.generate(["def f(x):"], params)
        texts.append((reply.text, reply.token_ids))
    assert texts[0] == texts[1]
    assert len(set(texts[0][1])) > 3


def test_a_folder_of_the_hub_s_cache_is_called_by_its_repository(
    folders: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--org--a--name" / "snapshots" / ("0" * 40)
    shutil.copytree(folders / "dense", snapshot)
    assert open_model(snapshot).name == "org/a--name"
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert open_model(link).name == "org/a--name"


def test_provenance_knows_a_folder_by_what_is_in_it(folders: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folders / "dense", copy)
    made = provenance(copy)
    assert made["model"] == "copy"
    assert made["model_bytes"] == (copy / "model.safetensors").stat().st_size
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config + " ")
    assert provenance(copy)["model_sha256"] != made["model_sha256"]
    (copy / "config.json").write_text(config)
    assert provenance(copy)["model_sha256"] == made["model_sha256"]


def test_a_folder_without_a_tokenizer_is_named(folders: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders / "dense" / name).read_bytes())
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing") as caught:
        open_model(tmp_path)
    assert str(tmp_path) in caught.value.message


def test_no_message_repeats_what_cannot_be_printed(folders: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folders / "dense" / name).read_bytes())
    whole = (folders / "dense" / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    header["\x1b[31m\n\ud800"] = header["model.norm.weight"]
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + whole[end:]
    )
    with pytest.raises(LoadError, match=r"x1b\[31m\\n\\ud800 is unexpected") as caught:
        open_model(tmp_path)
    assert caught.value.message.isprintable()


def refusal(path: Path) -> tuple[str, str | None]:
    with pytest.raises(LoadError) as caught:
        resolve_model(str(path))
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_a_folder_is_answered_with_the_folder(folders: Path, name: str) -> None:
    message, hint = refusal(folders / "mlx" / name)
    assert message.endswith(f"got the file {folders / 'mlx' / name}")
    assert hint == f"give its folder: {folders / 'mlx'}"


def test_a_folder_around_models_is_answered_with_what_it_has(folders: Path, tmp_path: Path) -> None:
    assert refusal(folders)[1] == f"give one of what it has: {folders / 'dense'}, {folders / 'mlx'}"
    snapshot = tmp_path / "models--ORG--NAME" / "snapshots" / "c0ffee"
    shutil.copytree(folders / "mlx", snapshot)
    assert refusal(snapshot.parent.parent)[1] == f"give one of what it has: {snapshot}"
    files = tmp_path / "files"
    files.mkdir()
    assert refusal(files)[1] is None
    for name in "abcde":
        (files / f"{name}.gguf").touch()
    listed = ", ".join(str(files / f"{name}.gguf") for name in "abc")
    assert refusal(files)[1] == f"give one of what it has: {listed} and 2 more"


def test_weights_without_a_configuration_are_told_apart(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert refusal(tmp_path)[1] == "its config.json is missing: fetch the rest of the model"
