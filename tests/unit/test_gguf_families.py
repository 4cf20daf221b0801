"""GGUF headers of other families than llama: what they say, and what is refused."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import LoadError
from slipstream.models.arch import Arch, score_scale
from slipstream.models.loading.arch_map import read_checkpoint
from slipstream.models.loading.gguf import read_gguf
from tests.families import CONFIGS, IN_GGUF, family_arch, random_weights, write_family_gguf


def arch_of(path: Path, name: str, **changes: Any) -> Arch:
    """Write a model with some keys changed ("__" stands for ".") and describe it."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    write_family_gguf(path, name, random_weights(family_arch(name)), changes)
    return read_checkpoint(read_gguf(path)).arch


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_header_describes_what_the_configuration_does(tmp_path: Path, name: str) -> None:
    got, expected = arch_of(tmp_path / "m.gguf", name), family_arch(name)
    assert got.kv_layers == expected.kv_layers
    assert got.features == expected.features
    for one, other in zip(got.attention, expected.attention, strict=True):
        assert one.frequencies == pytest.approx(other.frequencies, rel=1e-6)
        assert (one.window, one.head_dim, one.num_kv_heads, one.k_is_v) == (
            other.window,
            other.head_dim,
            other.num_kv_heads,
            other.k_is_v,
        )


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_scores_by_the_hidden_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layers: int
) -> None:
    # No key says so: llama.cpp tells the 27B by its number of layers.
    monkeypatch.setitem(CONFIGS, "27B", CONFIGS[name] | {"num_hidden_layers": layers})
    assert {item.scale for item in arch_of(tmp_path / "m.gguf", "27B").attention} == {1 / 4}
    assert arch_of(tmp_path / "m.gguf", name).attention[0].scale == score_scale(32)


def test_a_gemma3_without_a_window_sees_everything(tmp_path: Path) -> None:
    arch = arch_of(tmp_path / "m.gguf", "gemma3", attention__sliding_window=None)
    assert {item.window for item in arch.attention} == {0}
    assert {item.frequencies[1] for item in arch.attention} == {1e6 ** (-1 / 16)}


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("qwen2", {"attention__sliding_window": 64}, ["sliding_window", "64"]),
        ("qwen3", {"expert_count": 8}, ["expert_count", "8"]),
        ("qwen3", {"rope__scaling__type": "yarn"}, ["none or linear", "'yarn'"]),
        ("gemma3", {"rope__scaling__type": "yarn"}, ["none or linear", "'yarn'"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ("gemma4", {"embedding_length_per_layer_input": 256}, ["E2B", "256"]),
        ("gemma4", {"expert_count": 128}, ["expert_count", "128"]),
        ("gemma4", {"attention__sliding_window_pattern": [1, 0]}, ["7 integers", "2 numbers"]),
        ("gemma4", {"attention__head_count_kv": [2] * 6}, ["7 integers", "6 numbers"]),
        ("gemma4", {"attention__sliding_window": None}, ["sliding_window", "missing"]),
        ("gemma4", {"rope__dimension_count_swa": 16}, ["dimension_count_swa", "32", "16"]),
        ("gemma4", {"attention__shared_kv_layers": 7}, ["shared_kv_layers", "7"]),
        ("gemma4", {"attention__key_length": 32}, ["32"]),
        ("llama 3", {"attention__key_length": 64}, ["64"]),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(LoadError) as caught:
        arch_of(tmp_path / "m.gguf", name, **changes)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["llama 3", "gemma3", "gemma4, shared"])
def test_patched_headers_raise_load_errors_only(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    write_family_gguf(path, name, random_weights(family_arch(name)))
    whole, end = path.read_bytes(), read_gguf(path).data_offset
    draw = random.Random(7)
    for _ in range(150):
        content, at = bytearray(whole), draw.randrange(end)
        content[at : at + 4] = draw.randbytes(4)
        path.write_bytes(content)
        with contextlib.suppress(LoadError):
            assert read_checkpoint(read_gguf(path)).arch.num_layers > 0
