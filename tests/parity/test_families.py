"""Every family on the reference says what transformers says, in float32, beyond the window too."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.models.decoder import forward
from slipstream.models.loading.arch_map import read_checkpoint
from slipstream.models.loading.checkpoint import Checkpoint
from slipstream.models.loading.folder import read_folder
from slipstream.models.loading.gguf import read_gguf
from slipstream.models.loading.weights_map import load_decoder
from tests.families import (
    CONFIGS,
    IN_GGUF,
    WINDOW,
    family_arch,
    random_weights,
    write_family_gguf,
    write_folder,
)
from tests.tiny import make_backend, make_rows

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

LENGTH = 3 * WINDOW + 15  # beyond the window, and five pages with the last partly filled
NEW = 64
# Of the logits' standard deviation; transformers has its angles in float32, and Gemma 4 does not
# scale its scores, so that they feel it more.
TOLERANCE = {"gemma4": 1e-3}
USUAL = 1e-4
PAGES = [list(range(9, -1, -1))]


@cache
def theirs(name: str) -> tuple[Any, Any]:
    """Return transformers' logits of every position, and its greedy continuation."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder), name, random_weights(family_arch(name)))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        ids = torch.from_numpy(prompt())[None]
        with torch.inference_mode():
            logits = model(ids).logits[0].numpy()
            longer = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
            )
    return logits, longer[0, LENGTH:].tolist()


def prompt() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(8).integers(0, 97, LENGTH)


def ours(checkpoint: Checkpoint) -> tuple[Any, list[int]]:
    """Return the same of the reference."""
    backend, arch = make_backend("reference", kv_dtype="f32"), checkpoint.arch
    weights = load_decoder(checkpoint, backend)
    kv = backend.kv_cache(arch, 10, 160)
    step = backend.compile(
        lambda ops: forward(ops, arch, weights, kv), max_rows=LENGTH, max_logits=LENGTH
    )
    result = step(make_rows(prompt().tolist(), range(LENGTH), PAGES))
    logits, tokens = result.logits.copy(), [int(result.argmax[-1])]
    for position in range(LENGTH, LENGTH + NEW - 1):
        tokens.append(int(step(make_rows([tokens[-1]], [position], PAGES)).argmax[0]))
    return logits, tokens


def check(name: str, checkpoint: Checkpoint) -> None:
    expected, continued = theirs(name)
    logits, tokens = ours(checkpoint)
    worst = float(np.abs(logits - expected).max() / expected.std())
    assert worst < TOLERANCE.get(checkpoint.arch.family, USUAL)
    assert tokens == continued
    assert len(set(tokens)) > 5, "a model that repeats itself would hide mistakes"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path, name, random_weights(family_arch(name)), shards=2)
    check(name, read_folder(path).checkpoint)


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    path = write_family_gguf(tmp_path / "m.gguf", name, random_weights(family_arch(name)))
    check(name, read_checkpoint(read_gguf(path)))


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_own_folder_is_read(name: str, tmp_path: Path) -> None:
    # As it writes configurations, with every default and by layer.
    path = write_folder(tmp_path / "a", name, random_weights(family_arch(name)))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "b")
    got = read_folder(tmp_path / "b").checkpoint
    expected = read_folder(path).checkpoint
    assert got.arch == expected.arch
    with got.open() as read, expected.open() as read_expected:
        for role in expected.names:
            assert read(role).dequantize().tobytes() == read_expected(role).dequantize().tobytes()
