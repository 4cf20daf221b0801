"""The reference's logits are those of transformers' Llama in float32, on random tiny shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.models.arch import Arch
from slipstream.models.weights import Tensor
from tests.tiny import (
    ROPE_THETA,
    TinyTensors,
    make_backend,
    make_rows,
    tiny_arch,
    tiny_model,
    tiny_tensors,
)

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

LENGTH = 75  # five pages, the last one partly filled
TOLERANCE = 1e-4  # of the logits' standard deviation; float32 sums in another order

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "untied": {"tied_embedding": False},
    "one_kv_head": {"num_kv_heads": 1, "head_dim": 32},
    "every_head": {"num_kv_heads": 4, "num_layers": 3, "ffn_size": 160},
    "long_rope": {"rope_theta": 500000.0, "hidden_size": 96, "num_heads": 6, "norm_eps": 1e-6},
}


def half_split(matrix: np.ndarray, arch: Arch) -> np.ndarray:
    """Reorder q or k outputs so that pair (2i, 2i+1) of a head becomes (i, i + D/2)."""
    if not arch.uniform.rope_interleaved:
        return matrix
    heads = matrix.reshape(-1, arch.uniform.head_dim // 2, 2, matrix.shape[1])
    return np.ascontiguousarray(heads.transpose(0, 2, 1, 3)).reshape(matrix.shape)


def llama_of(tensors: TinyTensors, rope_theta: float) -> Any:
    """Return transformers' LlamaForCausalLM with the same dequantized weights."""
    arch, heads = tensors.arch, tensors.arch.uniform
    config = transformers.LlamaConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.ffn_size,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=heads.num_heads,
        num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_position_embeddings=arch.context_len,
        rms_norm_eps=arch.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=arch.tied_embedding,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    state: dict[str, np.ndarray] = {}

    def put(name: str, tensor: Tensor, *, rotated: bool = False) -> None:
        values = tensor.dequantize()
        state[name] = half_split(values, arch) if rotated else values

    put("model.embed_tokens.weight", tensors.embedding)
    put("model.norm.weight", tensors.norm)
    put("lm_head.weight", tensors.output)
    for i, layer in enumerate(tensors.layers):
        at = f"model.layers.{i}."
        put(at + "input_layernorm.weight", layer.attn_norm)
        put(at + "post_attention_layernorm.weight", layer.ffn_norm)
        put(at + "self_attn.q_proj.weight", layer.q, rotated=True)
        put(at + "self_attn.k_proj.weight", layer.k, rotated=True)
        put(at + "self_attn.v_proj.weight", layer.v)
        put(at + "self_attn.o_proj.weight", layer.attn_out)
        put(at + "mlp.gate_proj.weight", layer.gate)
        put(at + "mlp.up_proj.weight", layer.up)
        put(at + "mlp.down_proj.weight", layer.down)
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    model.load_state_dict({name: torch.from_numpy(values) for name, values in state.items()})
    return model


def worst_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference in units of the expected logits' standard deviation."""
    return float(np.abs(got - expected).max() / expected.std())


def ours(tensors: TinyTensors, ids: np.ndarray, **options: Any) -> np.ndarray:
    """Return the reference's logits of every position."""
    model = tiny_model(make_backend("reference", **options), tensors, max_rows=len(ids))
    pages = [list(range(6, -1, -1))]
    return model.step(make_rows(ids, range(len(ids)), pages)).logits


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", ["f32", "q4_1"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_llama(shape: str, kind: str, interleaved: bool) -> None:
    changes = {"rope_theta": ROPE_THETA, **SHAPES[shape]}
    arch = tiny_arch(**changes, rope_interleaved=interleaved)
    tensors = tiny_tensors(arch, kind=kind, seed=7)
    ids = np.random.default_rng(8).integers(0, arch.vocab_size, LENGTH)
    with torch.inference_mode():
        llama = llama_of(tensors, changes["rope_theta"])
        expected = llama(torch.from_numpy(ids)[None]).logits[0].numpy()
    assert worst_error(ours(tensors, ids, kv_dtype="f32"), expected) < TOLERANCE


def test_half_precision_kv_changes_logits_only_slightly() -> None:
    tensors = tiny_tensors(seed=7)
    ids = np.random.default_rng(8).integers(0, tensors.arch.vocab_size, LENGTH)
    exact, rounded = ours(tensors, ids, kv_dtype="f32"), ours(tensors, ids, kv_dtype="f16")
    assert 0 < worst_error(rounded, exact) < 0.02


def test_int8_activations_change_logits_only_slightly() -> None:
    tensors = tiny_tensors(seed=7)
    ids = np.random.default_rng(8).integers(0, tensors.arch.vocab_size, LENGTH)
    exact, rounded = ours(tensors, ids), ours(tensors, ids, activation_groups=True)
    assert 0 < np.std(rounded - exact) < 0.1 * exact.std()


def test_int8_rounding_takes_ties_to_even_and_keeps_zero_groups() -> None:
    from slipstream.kernels.reference import round_to_int8

    row = torch.zeros(96)
    row[:6] = torch.tensor([127.0, 0.5, 1.5, -2.5, 3.4, -126.6])
    row[64:66] = torch.tensor([-63.5, 0.3])
    expected = torch.zeros(96)
    expected[:6] = torch.tensor([127.0, 0.0, 2.0, -2.0, 3.0, -127.0])
    expected[64:66] = torch.tensor([-63.5, 0.5])
    assert torch.equal(round_to_int8(row), expected)


def test_int8_activations_leave_dense_weights_alone() -> None:
    tensors = tiny_tensors(kind="f16", seed=7)
    ids = np.random.default_rng(8).integers(0, tensors.arch.vocab_size, LENGTH)
    assert ours(tensors, ids).tobytes() == ours(tensors, ids, activation_groups=True).tobytes()
