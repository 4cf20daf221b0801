"""What a description says of itself, and that fast back ends refuse what they do not run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from slipstream.errors import LoadError
from slipstream.models import arch as features
from slipstream.models.arch import Arch, plain_frequencies
from slipstream.models.loading.checkpoint import tensor_shapes
from tests.tiny import ARCH, make_backend, tiny_arch

CHANGES: dict[str, dict[str, Any]] = {
    features.ROPE_MAGNITUDE: {"rope_magnitude": 1.2},
    features.SCORE_SCALE: {"scale": 1.0},
    features.WINDOW: {"window": 16},
    features.SCORE_SOFTCAP: {"softcap": 50.0},
    features.QK_NORM: {"qk_norm": True},
    features.V_NORM: {"v_norm": True},
    features.K_IS_V: {"k_is_v": True},
    features.QKV_BIAS: {"qkv_bias": True},
    features.SHARED_KV: {"kv_layers": (0, 0)},
    features.GELU: {"activation": "gelu_tanh"},
    features.EMBEDDING_SCALE: {"embedding_scale": 8.0},
    features.POST_NORMS: {"post_norms": True},
    features.LOGIT_SOFTCAP: {"logit_softcap": 30.0},
}


def mixed() -> Arch:
    """Return a decoder whose second layer has another head size."""
    first, second = tiny_arch().attention[0], tiny_arch(head_dim=32).attention[0]
    return dataclasses.replace(ARCH, attention=(first, second))


def test_a_plain_llama_has_no_features() -> None:
    assert not ARCH.features
    assert not tiny_arch(rope_theta=5e5, head_dim=80, num_kv_heads=4).features


@pytest.mark.parametrize("feature", CHANGES)
def test_each_change_is_one_feature(feature: str) -> None:
    assert tiny_arch(**CHANGES[feature]).features == {feature}


def test_layers_that_differ_are_a_feature_and_not_uniform() -> None:
    assert mixed().features == {features.MIXED_ATTENTION}
    with pytest.raises(LoadError, match="layers of different attention"):
        _ = mixed().uniform


@pytest.mark.parametrize("feature", [*CHANGES, features.MIXED_ATTENTION])
@pytest.mark.parametrize("name", ["cpu-avx512", "cpu-portable"])
def test_the_cpu_runs_a_feature_or_names_it(name: str, feature: str) -> None:
    arch = mixed() if feature == features.MIXED_ATTENTION else tiny_arch(**CHANGES[feature])
    backend = make_backend(name)
    message = ""
    try:
        backend.kv_cache(arch, 2, 32)
    except LoadError as error:
        message = error.message
    assert not message or message.startswith("the cpu back end does not run")
    assert feature in (message or feature)


def test_kv_is_that_of_the_layers_that_own_it() -> None:
    own = tiny_arch(num_layers=3)
    assert own.kv_width == 3 * 2 * own.uniform.kv_size
    assert tiny_arch(num_layers=3, kv_layers=(0, 1, 0)).kv_width == 2 * 2 * own.uniform.kv_size


def test_tensors_are_those_that_the_description_implies() -> None:
    shapes = tensor_shapes(
        tiny_arch(qk_norm=True, k_is_v=True, post_norms=True, kv_layers=(0, 0), num_kv_heads=1)
    )
    first = {name for name in shapes if name.startswith("layers.0.")}
    second = {name for name in shapes if name.startswith("layers.1.")}
    assert {"layers.0.k", "layers.0.k_norm", "layers.0.q_norm"} < first
    assert "layers.0.v" not in first
    assert not {"layers.1.k", "layers.1.v", "layers.1.k_norm"} & second
    assert shapes["layers.1.q"] == (64, 64)
    assert shapes["layers.1.post_ffn_norm"] == (64,)
    assert "output" not in shapes


def test_plain_frequencies_fall_from_one_to_near_the_base() -> None:
    assert plain_frequencies(4, 100.0) == (1.0, 0.1)
