"""MLX folders: every value is MLX's own, whatever bits, groups and overrides; damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.errors import LoadError
from slipstream.models.loading.finite import is_finite
from slipstream.models.loading.folder import MODEL_TYPES, read_folder
from slipstream.models.loading.mlx_source import MlxSource, unpack
from slipstream.models.loading.safetensors_files import read_files
from slipstream.models.weights import BFloat16, QuantizedTensor
from tests.families import CONFIGS, family_arch, folder_name, random_weights
from tests.mlx_files import pack, quantize, write_mlx
from tests.safetensors_files import safetensors_bytes

# MLX 0.32 itself, on its CPU: one row of 32 bfloat16 numbers, quantized by it with a group of 32
# (codes, scale, bias) and dequantized by it in float32.
# fmt: off
MLX_FACTS = {
    4: ("7f4d1bf8c6a3815e2c09d7b4926f3d1a", 0xBE8D, 0x4030,
        "00c0b0bf0080523f008054bf0000d33f00008fbe00601e4000000c3f00c0b0bf00808c3f00000ebf0040f63f"
        "000080bb00601e4000000c3f00808dbf00c0af3f00000ebf00c00c4000008b3e000030400080523f008054bf"
        "0000d33f00008fbe00c00c4000008b3e00c0b0bf00808c3f008054bf0040f63f000080bb00601e40"),
    5: ("bf6d5447f42b1b1a5e57b74cd076b2247ea64f15", 0xBE0D, 0x4030,
        "0060c2bf00c0753f00c077bf0000d33f000011be009015400080d13e00c0b0bf00209e3f004031bf0040f63f"
        "000080bb0030274000402f3f00209fbf00c0af3f0080d5be00f003400000093e0000304000c0753f00c077bf"
        "0060c13f00008fbe00c00c400080d13e0060c2bf00808c3f008054bf00a0e43f000011be00601e40"),
    6: ("bf5643ab11f297dca0839753af52029b1db187d863b39312", 0xBD8D, 0x4030,
        "0030cbbf00c0753f002066bf0000d33f008057be0090154000c0f43e00c0b0bf0050953f004031bf0070ed3f"
        "000080bb00c8224000402f3f005096bf00c0af3f00c0f8be00f0034000804f3e000030400020643f00c077bf"
        "0030ca3f00008fbe002811400080d13e0090b9bf00808c3f00e042bf00a0e43f000095bd00601e40"),
    8: ("ff69d741ae1886f35dcb34a20c7ae751be2996006ddb45b21d8af761cf39a611", 0xBC8B, 0x4030,
        "00d4c9bf00e8773f00e865bf00d4d23f00404fbe00f0154000e0f33e00c4afbf0004963f00c831bf0010ef3f"
        "0000a03a00f8224000102e3f00b495bf0014b03f00a0f2be007a034000c0513e000030400088663f004877bf"
        "0024ca3f00608abe008210400020d13e0074b8bf00548d3f002843bf0034e43f008088bd008a1d40"),
}
# fmt: on
PLAIN = {"group_size": 32, "bits": 4}


def one_matrix(folder: Path, stored: dict[str, tuple[str, Any]], **setting: Any) -> QuantizedTensor:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    source = MlxSource(read_files(folder), setting)
    assert list(source.shapes) == ["x.weight"]
    with source.open() as read:
        tensor = read("x.weight")
    assert isinstance(tensor, QuantizedTensor)
    assert tensor.shape == source.shapes["x.weight"]
    return tensor


@pytest.mark.parametrize("bits", MLX_FACTS)
def test_values_are_mlxs_own(bits: int, tmp_path: Path) -> None:
    packed, scale, bias, expected = MLX_FACTS[bits]
    stored = {
        "x.weight": ("U32", np.frombuffer(bytes.fromhex(packed), "<u4")[None]),
        "x.scales": ("BF16", np.array([[scale]], np.uint16)),
        "x.biases": ("BF16", np.array([[bias]], np.uint16)),
    }
    tensor = one_matrix(tmp_path, stored, bits=bits, group_size=32)
    assert isinstance(tensor.scale, BFloat16)
    assert tensor.dequantize().astype("<f4").tobytes().hex() == expected


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_values_are_scale_times_code_plus_bias(
    bits: int, group: int, dtype: str, tmp_path: Path
) -> None:
    random = np.random.default_rng(bits * group)
    values = random.standard_normal((300, 256), dtype=np.float32)
    values[3], values[4, :group] = 0.0, 2.0  # groups whose scale is 0
    values[5] *= np.float32(1e-6)
    made = quantize(values, bits=bits, group=group, dtype=dtype)
    stored = {
        "x.weight": ("U32", made.packed),
        "x.scales": (dtype, made.scales),
        "x.biases": (dtype, made.biases),
    }
    tensor = one_matrix(tmp_path, stored, bits=bits, group_size=group)
    assert (tensor.bits, tensor.zero, tensor.group) == (bits, 0, group)
    assert is_finite(tensor)
    np.testing.assert_array_equal(tensor.dequantize().view(np.uint32), made.values.view(np.uint32))


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_codes_come_back(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (600, 96), dtype=np.uint8)
    got = unpack(pack(codes, bits).view(np.uint8), bits)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, codes)


# One module of each kind has a setting of its own, one stays dense.
MIXED = PLAIN | {
    "model.layers.0.self_attn.q_proj": {"group_size": 64, "bits": 8},
    "model.layers.1.mlp.down_proj": {"group_size": 32, "bits": 6, "mode": "affine"},
    "model.layers.2.self_attn.v_proj": False,
    "model.embed_tokens": {"group_size": 64, "bits": 8},
}


@pytest.mark.parametrize("name", ["llama 3", "qwen2", "gemma3", "gemma4, shared"])
def test_a_whole_folder_is_read_by_role(name: str, tmp_path: Path) -> None:
    arch, family = family_arch(name), MODEL_TYPES[CONFIGS[name]["model_type"]]
    names = {role: folder_name(role, family.layer_names) for role in random_weights(arch)}
    weights = {names[role]: values for role, values in random_weights(arch).items()}
    means = write_mlx(tmp_path, weights, MIXED, config=CONFIGS[name])
    checkpoint = read_folder(tmp_path).checkpoint
    assert checkpoint.arch == arch
    kinds = {}
    with checkpoint.open() as read:
        for role in checkpoint.names:
            tensor = read(role)
            shift = family.norm_shift if role.rpartition(".")[2].endswith("norm") else 0.0
            expected = means[names[role]] + np.float32(shift)
            np.testing.assert_array_equal(tensor.dequantize(), expected, err_msg=role)
            if isinstance(tensor, QuantizedTensor):
                kinds[role] = (tensor.bits, tensor.group)
    assert kinds["embedding"] == kinds["layers.0.q"] == (8, 64)
    assert kinds["layers.1.down"] == (6, 32)
    assert kinds["layers.0.up"] == (4, 32)
    assert "layers.2.v" not in kinds


def small(**changes: Any) -> dict[str, tuple[str, Any]]:
    made = quantize(np.ones((4, 64), np.float32), group=32)
    stored: dict[str, tuple[str, Any]] = {
        "x.weight": ("U32", made.packed),
        "x.scales": ("BF16", made.scales),
        "x.biases": ("BF16", made.biases),
    }
    stored |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in stored.items() if value is not None}


@pytest.mark.parametrize(
    ("setting", "stored", "parts"),
    [
        (PLAIN | {"bits": 3}, small(), ["bits must be one of 4, 5, 6, 8", "got 3"]),
        (PLAIN | {"bits": True}, small(), ["bits", "got True"]),
        (PLAIN | {"group_size": 16}, small(), ["group_size must be one of 32, 64, 128", "got 16"]),
        ({"bits": 4}, small(), ["group_size", "missing"]),
        (PLAIN | {"mode": "mxfp4"}, small(), ["mode must be 'affine'", "'mxfp4'"]),
        (PLAIN | {"x": {"bits": 2, "group_size": 32}}, small(), ["x: bits", "got 2"]),
        (PLAIN | {"x": "all"}, small(), ["x must be an object", "'all'"]),
        (PLAIN | {"x": False}, small(), ["x must be an object", "False"]),
        (PLAIN | {"bits": 8}, small(), ["x.scales", "[4, 1]", "8 bits", "[4, 2]"]),
        (PLAIN | {"group_size": 64}, small(), ["x.scales", "[4, 1]", "groups of 64"]),
        (PLAIN | {"bits": 5}, small(), ["x.scales", "5 bits"]),
        (PLAIN, small(x__biases=None), ["x.biases is missing"]),
        (PLAIN, small(x__biases=("F16", np.zeros((4, 1), np.float16))), ["x.biases", "[4, 1]"]),
        (PLAIN, small(x__scales=("I32", np.zeros((4, 2), np.int32))), ["x.scales", "I32"]),
        (PLAIN, small(x__weight=("F16", np.zeros((4, 8), np.float16))), ["x.weight", "U32", "F16"]),
        (PLAIN, small(x__weight=("U32", np.zeros(8, np.uint32))), ["x.weight", "[8]"]),
    ],
)
def test_what_does_not_fit_is_refused(
    setting: dict[str, Any], stored: dict[str, tuple[str, Any]], parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    with pytest.raises(LoadError) as caught:
        MlxSource(read_files(tmp_path), setting)
    for part in parts:
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("block", "part"),
    [({"quant_method": "gptq", "bits": 4}, "'gptq'"), ([4], "an array"), ("q4", "'q4'")],
)
def test_other_quantizations_are_refused_by_name(block: Any, part: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(small()))
    config = CONFIGS["qwen2"] | {"quantization_config": block}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="quantization must be MLX's") as caught:
        read_folder(tmp_path)
    assert part in caught.value.message


WHOLE = safetensors_bytes(small())


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    place=st.integers(0, len(WHOLE) - 1),
    byte=st.integers(0, 255),
    cut=st.none() | st.integers(0, len(WHOLE)),
)
def test_damage_is_a_load_error_or_other_numbers(
    place: int, byte: int, cut: int | None, tmp_path: Path
) -> None:
    raw = bytearray(WHOLE)
    raw[place] = byte
    (tmp_path / "model.safetensors").write_bytes(bytes(raw[:cut]))
    try:
        source = MlxSource(read_files(tmp_path), PLAIN)
        with source.open() as read:
            sizes = [read(name).dequantize().size for name in source.shapes]
    except LoadError:
        return
    assert max(sizes, default=0) <= len(WHOLE) * 2
