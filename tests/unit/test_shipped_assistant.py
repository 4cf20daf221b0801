"""What is shipped loads, fits its target and is small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import slipstream
from slipstream.errors import LoadError
from slipstream.models.loading import open_model, resolve_model
from slipstream.models.loading.assistant import read_assistant
from slipstream.models.loading.assistant_config import AssistantTarget
from tests.tiny import tiny_arch

FOLDERS = sorted((Path(slipstream.__file__).parent / "drafters" / "checkpoints").glob("*/"))
SHIPPED = [folder for folder in FOLDERS if (folder / "config.json").exists()]
MAX_BYTES = 16 << 20


def test_the_default_model_has_one() -> None:
    assert "smollm2-135m" in [folder.name for folder in SHIPPED]


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_shipped_assistant_is_whole_and_small(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    block = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    target = AssistantTarget(**block["target"])
    others = {name: getattr(target, name) for name in vars(target) if name != "hash"}
    found = read_assistant(folder, tiny_arch(**others), target.hash)
    assert found.config.target == target
    assert block["training"]["finished"] is True


@pytest.mark.real_model
def test_the_default_models_fits_its_file() -> None:
    try:
        file = open_model(resolve_model("smollm2-135m"))
    except LoadError as error:
        pytest.skip(error.message)
    folder = next(folder for folder in SHIPPED if folder.name == "smollm2-135m")
    found = read_assistant(folder, file.arch, file.fingerprint)
    assert file.tokenizer.eos_id in found.vocab_map
