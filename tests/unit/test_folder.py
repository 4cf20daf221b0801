"""Hugging Face folders: what is read, and what is refused with both values named."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slipstream.errors import LoadError
from slipstream.models.arch import plain_frequencies
from slipstream.models.loading.fingerprint import fingerprint_of
from slipstream.models.loading.folder import read_folder
from slipstream.models.loading.folder_template import read_folder_template
from slipstream.models.weights import DenseTensor, Tensor
from tests.families import (
    CONFIGS,
    FULL,
    SLIDING,
    family_arch,
    peak_of_loading,
    random_weights,
    write_folder,
)


def written(folder: Path, name: str = "llama 2", **options: Any) -> Path:
    return write_folder(folder, name, random_weights(family_arch(name)), **options)


def edit(folder: Path, **changes: Any) -> Path:
    """Change keys of a folder's configuration; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


# ---- what is read


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_tensors_keep_their_precision(tmp_path: Path, dtype: str, shards: int) -> None:
    folder = written(tmp_path, dtype=dtype, shards=shards)
    weights = random_weights(family_arch("llama 2"))
    with read_folder(folder).checkpoint.open() as read:
        for role, values in weights.items():
            got = read(role)
            assert isinstance(got, DenseTensor)
            assert got.dtype == dtype
            assert np.array_equal(got.values, values.astype(got.values.dtype))


def test_bfloat16_is_read_bit_for_bit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="only torch writes bfloat16")
    from safetensors.torch import save_file as save_torch

    folder = written(tmp_path)
    stored = load_file(folder / "model.safetensors")
    halves = {name: torch.from_numpy(values).bfloat16() for name, values in stored.items()}
    save_torch(halves, folder / "model.safetensors")
    with read_folder(folder).checkpoint.open() as read:
        got = read("layers.1.q")
    expected = halves["model.layers.1.self_attn.q_proj.weight"].view(torch.uint16).numpy()
    assert isinstance(got, DenseTensor)
    assert got.dtype == "bf16"
    assert np.array_equal(got.values, expected)


def test_norms_of_one_plus_w_get_their_one(tmp_path: Path) -> None:
    folder = written(tmp_path, "gemma3")
    stored = load_file(folder / "model.safetensors")
    with read_folder(folder).checkpoint.open() as read:
        for role, name in (("norm", "norm"), ("layers.2.q_norm", "layers.2.self_attn.q_norm")):
            got = read(role).dequantize()
            assert np.array_equal(got, stored[f"model.{name}.weight"] + np.float32(1))


def test_arrays_outlive_the_open_folder(tmp_path: Path) -> None:
    folder = written(tmp_path)
    with read_folder(folder).checkpoint.open() as read:
        kept = [read(f"layers.{i}.down") for i in range(3)]
    weights = random_weights(family_arch("llama 2"))
    for index, tensor in enumerate(kept):
        assert np.array_equal(tensor.dequantize(), weights[f"layers.{index}.down"])


def test_the_older_spelling_of_rope_is_read(tmp_path: Path) -> None:
    expected = read_folder(written(tmp_path / "a", "llama 3")).checkpoint.arch
    rope = dict(CONFIGS["llama 3"]["rope_parameters"])
    theta = rope.pop("rope_theta")
    old = edit(
        written(tmp_path / "b", "llama 3"),
        rope_parameters=None,
        rope_theta=theta,
        rope_scaling=rope,
    )
    assert read_folder(old).checkpoint.arch == expected


def test_the_older_spelling_of_gemma3_is_read(tmp_path: Path) -> None:
    old = edit(
        written(tmp_path, "gemma3"),
        sliding_window_pattern=6,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    arch = read_folder(old).checkpoint.arch
    assert arch.attention[0].frequencies == plain_frequencies(32, 1e4)
    full = tuple(frequency / 8 for frequency in plain_frequencies(32, 1e6))
    assert [item.frequencies == full for item in arch.attention] == [False] * 5 + [True, False]


def test_keys_of_no_consequence_are_left_alone(tmp_path: Path) -> None:
    expected = read_folder(written(tmp_path)).checkpoint.arch
    edit(
        tmp_path,
        torch_dtype="bfloat16",
        transformers_version="4.40.0",
        pretraining_tp=2,
        attention_dropout=0.1,
        architectures=["LlamaForCausalLM"],
        a_norm_of_the_future=False,
    )
    assert read_folder(tmp_path).checkpoint.arch == expected


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_model_of_one_that_sees_is_read_alone(tmp_path: Path, prefix: str) -> None:
    written(tmp_path, "gemma4")
    expected = read_folder(tmp_path).checkpoint.arch
    config = json.loads((tmp_path / "config.json").read_text())
    block = {"model_type": "gemma4_unified", "text_config": config, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(block))
    stored = {
        name.replace("model.", prefix, 1): values
        for name, values in load_file(tmp_path / "model.safetensors").items()
    }
    eye = np.ones(3, np.float32)
    stored |= {"model.vision_embedder.patch.weight": eye, "model.embed_audio.x.weight": eye}
    save_file(stored, tmp_path / "model.safetensors")
    got = read_folder(tmp_path).checkpoint
    assert got.arch == expected
    assert got.names["layers.0.scale"] == f"{prefix}layers.0.layer_scalar"


def test_a_tied_output_may_be_stored_twice(tmp_path: Path) -> None:
    written(tmp_path, "qwen2")
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    assert "output" not in read_folder(tmp_path).checkpoint.names


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("llama 2", {"model_type": "mamba"}, ["llama", "'mamba'"]),
        ("llama 2", {"model_type": None}, ["model_type", "None"]),
        ("llama 2", {"hidden_size": None}, ["hidden_size", "missing"]),
        ("llama 2", {"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ("llama 2", {"num_key_value_heads": 3}, ["multiple", "4", "3"]),
        ("llama 2", {"num_attention_heads": 5}, ["multiple", "64", "5"]),
        ("llama 2", {"head_dim": 15}, ["even", "15"]),
        ("llama 2", {"num_hidden_layers": 1 << 40}, ["num_hidden_layers"]),
        ("llama 2", {"hidden_act": "relu"}, ["silu", "'relu'"]),
        ("llama 2", {"attention_bias": True}, ["attention_bias", "False", "True"]),
        ("llama 2", {"mlp_bias": True}, ["mlp_bias", "False", "True"]),
        ("llama 2", {"sliding_window": 64}, ["sliding_window", "64"]),
        ("llama 2", {"residual_multiplier": 0.5}, ["residual_multiplier", "0.5"]),
        ("llama 2", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "1", "0.5"]),
        ("llama 2", {"quantization_config": {"quant_method": "gptq"}}, ["MLX", "gptq"]),
        ("llama 2", {"rope_scaling": {"type": "yarn", "factor": 4}}, ["llama3", "'yarn'"]),
        ("llama 2", {"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        ("llama 2", {"rope_scaling": [4]}, ["rope_scaling", "object"]),
        ("llama 3", {"rope_parameters": {"rope_type": "llama3", "factor": 8}}, ["missing"]),
        ("llama 2", {"rope_theta": 10**400}, ["rope_theta", "[1, 1e+18]", "1000"]),
        ("llama 2", {"rope_theta": 0.5}, ["rope_theta", "[1, 1e+18]", "0.5"]),
        ("llama 2", {"rms_norm_eps": 10**400}, ["rms_norm_eps", "[1e-18, 1]", "1000"]),
        ("llama 2", {"rms_norm_eps": 1e300}, ["rms_norm_eps", "[1e-18, 1]", "1e+300"]),
        ("llama 2", {"rms_norm_eps": 5e-324}, ["rms_norm_eps", "[1e-18, 1]", "5e-324"]),
        ("gemma2", {"attn_logit_softcapping": 1e-300}, ["softcapping", "1e-18", "1e-300"]),
        ("gemma2", {"final_logit_softcapping": 1e300}, ["softcapping", "1e+18", "1e+300"]),
        ("llama, linear", {"rope_theta": 5e5}, ["must be equal", "500000", "10000"]),
        ("llama 2", {"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "1", "0.5"]),
        (
            "llama 2",
            {"rope_scaling": {"type": "linear", "factor": 2, "mscale": 3}},
            ["rope_scaling.mscale", "linear", "3"],
        ),
        ("llama 2", {"rope_parameters": {SLIDING: {}}}, [SLIDING, "default"]),
        ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, ["rope_theta", FULL, SLIDING, "5.0"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ["3 entries", "1"]),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, ["full_attention", "linear"]),
        ("qwen3", {"attention_bias": True}, ["attention_bias", "False", "True"]),
        ("gemma3", {"use_bidirectional_attention": True}, ["bidirectional", "False", "True"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ("gemma4", {"hidden_size_per_layer_input": 256}, ["E2B", "0", "256"]),
        ("gemma4", {"model_type": "gemma4_text"}, ["E2B", "0", "256"]),
        ("gemma4", {"enable_moe_block": True}, ["experts", "26B", "True"]),
        ("gemma4", {"use_bidirectional_attention": "all"}, ["vision", "'all'"]),
        ("gemma4", {"num_kv_shared_layers": 7}, ["num_kv_shared_layers", "7"]),
        ("gemma4", {"num_kv_shared_layers": 6}, ["6", "full_attention"]),
        ("gemma4, shared", {"use_double_wide_mlp": True}, ["double_wide", "False", "True"]),
        ("gemma4", {"per_layer_config": {"1": {"hidden_size": 8}}}, ["1.hidden_size"]),
        ("gemma4", {"layer_types": ["full_attention"] * 6 + ["sliding_attention"]}, ["last"]),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], parts: list[str]
) -> None:
    edit(written(tmp_path, name), **changes)
    with pytest.raises(LoadError) as caught:
        read_folder(tmp_path)
    for part in parts:
        assert part in str(caught.value)


def drop(stored: dict[str, Any]) -> None:
    del stored["model.layers.2.mlp.up_proj.weight"]


def turn(stored: dict[str, Any]) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    stored[name] = np.ascontiguousarray(stored[name].T)


def add(stored: dict[str, Any]) -> None:
    stored["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)


def bury(stored: dict[str, Any]) -> None:
    stored["deep.embed_tokens.weight"] = stored.pop("model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (drop, ["layers.2.mlp.up_proj", "[96, 64]", "missing"]),
        (turn, ["layers.2.mlp.up_proj", "[96, 64]", "[64, 96]"]),
        (add, ["q_proj.bias", "unexpected"]),
        (bury, ["embed_tokens", "missing"]),
    ],
)
def test_tensors_must_be_those_of_the_description(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], parts: list[str]
) -> None:
    stored = load_file(written(tmp_path) / "model.safetensors")
    damage(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(LoadError) as caught:
        read_folder(tmp_path)
    for part in parts:
        assert part in str(caught.value)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    stored = load_file(written(tmp_path) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    stored[name] = stored[name].astype(np.int32)
    save_file(stored, tmp_path / "model.safetensors")
    with (
        read_folder(tmp_path).checkpoint.open() as read,
        pytest.raises(LoadError, match="BF16, got I32"),
    ):
        read("layers.0.up")


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path, shards=2)
    index = folder / "model.safetensors.index.json"
    (folder / "model-1.safetensors").rename(folder / "away")
    with pytest.raises(LoadError, match=r"model-1\.safetensors.*missing"):
        read_folder(folder)
    shutil.copy(folder / "model-0.safetensors", folder / "model-1.safetensors")
    with pytest.raises(LoadError, match="is in model-0"):
        read_folder(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(LoadError, match="outside of the folder"):
        read_folder(folder)
    index.write_text(json.dumps({"weight_map": {"a": "b" * 5000}}))
    with pytest.raises(LoadError, match=r"bbb, which .* is missing"):
        read_folder(folder)
    index.write_text("[]")
    with pytest.raises(LoadError, match="index"):
        read_folder(folder)
    index.unlink()
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor"):
        read_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(LoadError, match=r"config\.json cannot be read"):
        read_folder(folder)


def test_a_file_that_changed_is_not_read(tmp_path: Path) -> None:
    checkpoint = read_folder(written(tmp_path)).checkpoint
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(LoadError, match="changed"), checkpoint.open():
        pass


def test_cut_and_patched_files_raise_load_errors_only(tmp_path: Path) -> None:
    path = written(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(3)
    refused = 0
    for trial in range(150):
        content = bytearray(whole[: draw.randrange(len(whole))] if trial % 3 == 0 else whole)
        if trial % 3 and content:
            at = draw.randrange(min(header, len(content)))
            content[at : at + draw.randrange(1, 9)] = draw.randbytes(draw.randrange(1, 9))
        path.write_bytes(content)
        try:
            checkpoint = read_folder(tmp_path).checkpoint
            with checkpoint.open() as read:
                for role in checkpoint.names:
                    read(role)
        except LoadError:
            refused += 1
    assert refused > 100


# ---- templates and fingerprints

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_the_template_file_goes_before_the_tokenizers_key(tmp_path: Path) -> None:
    assert read_folder_template(tmp_path, {}) is None
    config = {"chat_template": "key", "bos_token": {"content": "<s>"}, "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = read_folder_template(tmp_path, {"bos_token": "?", "eos_token": "</s>"})
    assert template is not None
    assert template.render(MESSAGES) == "key"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}file")
    template = read_folder_template(tmp_path, {"bos_token": "?", "eos_token": "</s>"})
    assert template is not None
    assert template.render(MESSAGES) == "<s></s>file"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = read_folder_template(tmp_path, {})
    assert template is not None
    assert template.render(MESSAGES) == "yes"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(LoadError, match="must be a text, got 5"):
        read_folder_template(tmp_path, {})


def test_fingerprints_follow_configuration_and_weights(tmp_path: Path) -> None:
    def of(folder: Path) -> str:
        read = read_folder(folder)
        return fingerprint_of(read.data_offsets, read.config)

    first, second = written(tmp_path / "a"), written(tmp_path / "b")
    assert of(first) == of(second)
    edit(second, torch_dtype="bfloat16")
    assert of(first) != of(second)
    stored = load_file(first / "model.safetensors")
    before = of(first)
    stored["model.norm.weight"][0] += 1
    save_file(stored, first / "model.safetensors")
    assert of(first) != before


# ---- memory


class Letting:
    """A back end that keeps nothing but the size of what it was given."""

    takes_pieces = False

    def __init__(self) -> None:
        self.largest = 0

    def matrix(self, parts: Sequence[Tensor]) -> None:
        for part in parts:
            values = part.values if isinstance(part, DenseTensor) else part.codes
            self.largest = max(self.largest, values.nbytes)

    def vector(self, tensor: Tensor) -> None:
        assert tensor.shape


@pytest.mark.parametrize(("kind", "share"), [("none", 0.2), ("q4", 1.4)])
def test_loading_holds_one_matrix_and_copies_none(tmp_path: Path, kind: str, share: float) -> None:
    # Dense matrices stay in the map; rounded ones take a byte a code, with their scales.
    backend = Letting()
    peak = peak_of_loading(tmp_path, kind, backend)
    assert backend.largest >= 1 << 24
    assert peak < share * backend.largest + (8 << 20)
