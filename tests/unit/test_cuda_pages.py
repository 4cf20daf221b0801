"""What KV pages take on the GPU: padded heads, and only layers that own their keys and values."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="pages are torch's")

from slipstream.kernels.cuda.memory import CudaMemory
from slipstream.kernels.cuda.pages import SUPPORTED, padded_head_dim, page_bytes
from slipstream.models.arch import AttentionArch
from tests.tiny import tiny_arch


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(16, 32), (64, 64), (80, 96), (160, 192), (256, 256), (320, 384)]
)
def test_heads_are_padded_to_whole_words_of_every_warp(head_dim: int, padded: int) -> None:
    assert padded_head_dim(head_dim) == padded


def kinds() -> tuple[AttentionArch, AttentionArch]:
    """Return the attention of two layers with pages of different sizes."""
    narrow = tiny_arch(head_dim=64, num_kv_heads=2).uniform
    wide = tiny_arch(head_dim=512, num_kv_heads=1).uniform
    return narrow, wide


def test_a_page_is_the_sum_over_the_layers_that_own_one() -> None:
    narrow, wide = kinds()
    layers = (narrow, narrow, wide, narrow)
    owned = 2 * 2 * 16 * (2 * 64)  # K and V, two bytes, positions, columns
    assert page_bytes(tiny_arch(num_layers=3, attention=(narrow,) * 3)) == 3 * owned
    arch = tiny_arch(num_layers=4, attention=layers, kv_layers=(0, 0, 2, 3))
    assert page_bytes(arch) == 2 * owned + 2 * 2 * 16 * 512


def test_work_space_grows_with_the_widest_layer() -> None:
    narrow, wide = kinds()
    limits = {"max_rows": 8, "max_logits": 8, "max_len": 512}
    plain = tiny_arch(num_layers=2, attention=(narrow, narrow))
    mixed = tiny_arch(num_layers=2, attention=(narrow, wide))
    memory = CudaMemory()
    assert memory.workspace_bytes(mixed, **limits) > memory.workspace_bytes(plain, **limits)


def test_what_is_supported_are_features_of_a_description() -> None:
    everything = tiny_arch(
        activation="gelu_tanh",
        embedding_scale=2.0,
        post_norms=True,
        logit_softcap=30.0,
        num_layers=2,
        kv_layers=(0, 0),
        rope_magnitude=1.1,
        scale=1.0,
        window=8,
        softcap=2.0,
        qk_norm=True,
        v_norm=True,
        k_is_v=True,
        qkv_bias=True,
    )
    assert everything.features <= SUPPORTED
