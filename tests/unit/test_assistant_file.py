"""Checkpoints of an assistant: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slipstream.errors import LoadError, MismatchError
from slipstream.models.loading.assistant import read_assistant, write_assistant
from slipstream.models.loading.assistant_config import AssistantTarget
from slipstream.models.loading.assistant_tensors import quantize
from slipstream.models.weights import QuantizedTensor
from tests.assistants import random_assistant, write_random_assistant
from tests.tiny import ARCH, tiny_arch

HASH = "ab" * 16


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_what_is_written_is_read_back(tmp_path: Path, bits: int | None) -> None:
    config, tensors, vocab_map = random_assistant(ARCH, HASH, bits=bits)
    write_assistant(tmp_path / "a", config, tensors, vocab_map, training={"seed": 1})
    found = read_assistant(tmp_path / "a", ARCH, HASH)
    assert found.config == config
    assert (found.vocab_map == vocab_map).all()
    assert found.tensors.keys() == tensors.keys()
    for name, values in tensors.items():
        got = found.tensors[name].dequantize()
        if name in config.vector_shapes():
            assert (got == values).all()
        elif bits is None:
            assert (got == values.astype(np.float16)).all()
        else:
            assert isinstance(found.tensors[name], QuantizedTensor)
            assert (got == quantize(values, bits).dequantize()).all()


@pytest.mark.parametrize(("bits", "levels"), [(4, 15), (8, 254)])
def test_rounding_is_within_half_a_step(bits: int, levels: int) -> None:
    values = np.random.default_rng(0).standard_normal((40, 96), dtype=np.float32)
    values[3] = 0
    groups = values.reshape(40, 3, 32)
    span = groups.max(2) - groups.min(2) if bits == 4 else 2 * np.abs(groups).max(2)
    error = np.abs(quantize(values, bits).dequantize() - values).reshape(40, 3, 32).max(2)
    # The stored scale and bias are rounded to float16 themselves.
    assert (error <= 0.5 * span / levels * 1.01 + 2e-3).all()


def test_bfloat16_matrices_are_read_exactly(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    path = write_random_assistant(tmp_path / "a", ARCH, HASH, bits=None)
    stored = load_torch(path / "model.safetensors")
    stored["post"] = stored["post"].to(torch.bfloat16)
    save_torch(stored, path / "model.safetensors")
    got = read_assistant(path, ARCH, HASH).tensors["post"]
    assert (got.dequantize() == stored["post"].float().numpy()).all()


def rewrite(path: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's configuration; "a.b" reaches inside, None of a key removes."""
    block = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        inner = block
        *outer, last = key.split("__")
        for name in outer:
            inner = inner[name]
        if value is KeyError:
            del inner[last]
        else:
            inner[last] = value
    (path / "config.json").write_text(json.dumps(block))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "other"}, "type must be 'slipstream-assistant', got 'other'"),
        ({"version": 2}, "version must be 1, got 2"),
        ({"max_k": KeyError}, "max_k is missing"),
        ({"new_key": 1}, "new_key is unknown"),
        ({"target__new": 1}, "target.new is unknown"),
        ({"target__hash": KeyError}, "target.hash is missing"),
        ({"target": []}, "target must be an object, got list"),
        ({"hidden_size": "32"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"num_heads": 3}, "multiple of the target's 2 KV heads, got 3"),
        ({"feature_layers": [0]}, r"feature_layers must be .* in \[1, 2\], got \[0\]"),
        ({"kv_layers": [2]}, r"kv_layers must be .* in \[0, 1\], got \[2\]"),
        ({"kv_layers": []}, "kv_layers must be"),
        ({"kv_layers": [1.5]}, "kv_layers must be a list of integers"),
        ({"draft_vocab_size": 98}, "at most the target's 97, got 98"),
        ({"draft_vocab_size": 49}, "vocab_map|output"),
        ({"max_k": 16}, r"max_k must be an integer in \[1, 15\], got 16"),
        ({"quantization": {"bits": 5, "group": 32}}, "quantization must be"),
        ({"quantization": {"bits": 8, "group": 32}}, "tensor .* must be U8 of shape"),
        ({"quantization": None}, "tensor .* is missing"),
        ({"ffn_size": 96}, r"gate.codes must be U8 of shape \[96, 16\], got U8 of shape \[64"),
        ({"target__norm_eps": float("nan")}, "norm_eps must be"),
        ({"lean": 1}, "lean must be true or false, got 1"),
        ({"lean": True}, "a lean head is as wide as its target, 64, got 32"),
        ({"embedding_scale": 0}, "embedding_scale must be a number above 0, got 0"),
        ({"clusters": 5}, "clusters must be null or an object, got int"),
        ({"clusters": {"count": 5}}, r"clusters\.top is missing"),
        ({"clusters": {"count": 5, "top": 6}}, r"clusters\.top must be an integer in \[1, 5\]"),
        ({"clusters": {"count": 7, "top": 2}}, "must be a multiple of the 7 clusters, got 50"),
        ({"clusters": {"count": 5, "top": 2}}, "tensor members is missing|centroids"),
    ],
)
def test_a_wrong_configuration_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_random_assistant(tmp_path / "a", ARCH, HASH)
    rewrite(path, **changes)
    with pytest.raises(LoadError, match=message) as caught:
        read_assistant(path, ARCH, HASH)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, "\xff"])
def test_a_damaged_configuration_is_refused(tmp_path: Path, text: str) -> None:
    path = write_random_assistant(tmp_path / "a", ARCH, HASH)
    (path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(LoadError, match=r"config\.json"):
        read_assistant(path, ARCH, HASH)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    path = write_random_assistant(tmp_path / "a", ARCH, HASH)
    (path / name).unlink()
    with pytest.raises(LoadError, match=f"{name} is missing"):
        read_assistant(path, ARCH, HASH)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_truncated_tensors_are_refused(tmp_path: Path, size: int) -> None:
    path = write_random_assistant(tmp_path / "a", ARCH, HASH)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(LoadError, match=r"model\.safetensors cannot be read"):
        read_assistant(path, ARCH, HASH)


Stored = dict[str, np.ndarray]


def _descending(stored: Stored) -> None:
    stored["vocab_map"] = stored["vocab_map"][::-1].copy()


def _beyond(stored: Stored) -> None:
    stored["vocab_map"][-1] = ARCH.vocab_size


def _not_finite(stored: Stored) -> None:
    stored["post.scale"][0, 0] = np.inf


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda stored: stored.pop("post.bias"), "tensor post.bias .* is missing"),
        (lambda stored: stored.update(more=np.zeros(3, np.float32)), "tensor more is unexpected"),
        (lambda stored: stored.update(norm=np.zeros(3, np.float32)), r"norm must be F32 of shape"),
        (lambda stored: stored.update(norm=np.zeros(32, np.float16)), "norm must be F32 .* F16"),
        (lambda stored: stored.update(norm=np.zeros(32, np.int64)), "norm must be one of .* I64"),
        (lambda stored: stored.pop("vocab_map"), "vocab_map is missing"),
        (_descending, r"vocab_map must ascend within \[0, 96\]"),
        (_beyond, r"vocab_map must ascend within \[0, 96\]"),
        (_not_finite, "post holds an infinity"),
    ],
)
def test_wrong_tensors_are_refused(
    tmp_path: Path, damage: Callable[[Stored], Any], message: str
) -> None:
    path = write_random_assistant(tmp_path / "a", ARCH, HASH)
    stored = load_file(path / "model.safetensors")
    damage(stored)
    save_file(stored, path / "model.safetensors")
    with pytest.raises(LoadError, match=message):
        read_assistant(path, ARCH, HASH)


@pytest.mark.parametrize("field", ["hidden_size", "num_layers", "vocab_size", "rope_theta"])
def test_a_foreign_target_is_refused_with_both_values(tmp_path: Path, field: str) -> None:
    path = write_random_assistant(tmp_path / "a", ARCH, HASH)
    other = tiny_arch(**{field: 2 * getattr(AssistantTarget.of(ARCH, HASH), field)})
    with pytest.raises(MismatchError) as caught:
        read_assistant(path, other, HASH)
    targets = [AssistantTarget.of(arch, HASH) for arch in (ARCH, other)]
    for value in (field, *(repr(getattr(target, field)) for target in targets)):
        assert value in str(caught.value)


def test_another_model_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    path = write_random_assistant(tmp_path / "a", ARCH, HASH)
    with pytest.raises(MismatchError, match=f"hash '{HASH}', this one has '{'cd' * 16}'"):
        read_assistant(path, ARCH, "cd" * 16)


def test_clusters_are_read_back_and_must_be_equal(tmp_path: Path) -> None:
    path = write_random_assistant(tmp_path / "a", ARCH, HASH, clusters=(10, 3))
    found = read_assistant(path, ARCH, HASH)
    assert found.clusters is not None
    assert found.clusters.top == 3
    assert (np.bincount(found.clusters.members) == 5).all()
    stored = load_file(path / "model.safetensors")
    stored["members"][stored["members"] == 0] = 1
    save_file(stored, path / "model.safetensors")
    with pytest.raises(LoadError, match="members must part the vocabulary into 10 equal clusters"):
        read_assistant(path, ARCH, HASH)


def test_writing_refuses_what_could_not_be_read(tmp_path: Path) -> None:
    config, tensors, vocab_map = random_assistant(ARCH, HASH)
    with pytest.raises(LoadError, match="tensor post is missing"):
        write_assistant(
            tmp_path, config, {k: v for k, v in tensors.items() if k != "post"}, vocab_map
        )
    with pytest.raises(LoadError, match="post holds an infinity"):
        write_assistant(tmp_path, config, tensors | {"post": tensors["post"] * 1e9}, vocab_map)
    with pytest.raises(LoadError, match="vocab_map must ascend"):
        write_assistant(tmp_path, config, tensors, vocab_map[::-1].copy())
    with pytest.raises(LoadError, match="num_heads"):
        write_assistant(tmp_path, dataclasses.replace(config, num_heads=3), tensors, vocab_map)
