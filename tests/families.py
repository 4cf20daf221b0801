"""Tiny models of every family: configurations, random weights, files in the formats there are."""

from __future__ import annotations

import dataclasses
import json
import struct
import tracemalloc
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from slipstream.models.arch import Arch
from slipstream.models.loading.checkpoint import (
    EMBEDDING,
    NORM,
    OUTPUT,
    Checkpoint,
    TensorReader,
    tensor_shapes,
)
from slipstream.models.loading.families.gguf_arch import BLOCK
from slipstream.models.loading.folder import MODEL_TYPES, read_folder
from slipstream.models.loading.keys import Keys
from slipstream.models.loading.weights_map import load_decoder
from slipstream.models.weights import F32, DenseTensor, Tensor
from tests.gguf_files import Entry, gguf_bytes, toy_tokenizer
from tests.mlx_files import write_mlx
from tests.quantized import KINDS as QUANTIZED
from tests.quantized import random_matrix
from tests.tiny import KINDS, quantize

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 20  # neither a page nor a half of one
_PLAIN = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GEMMA = {key: value for key, value in _PLAIN.items() if key != "hidden_act"} | {
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 3.0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA4_TYPES = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, FULL]

# What config.json says, the smallest models that have all that their family has.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama 2": _PLAIN | {"model_type": "llama", "num_key_value_heads": 4},
    "llama 3": _PLAIN
    | {
        "model_type": "llama",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_parameters": _LLAMA3_ROPE,
    },
    "llama, linear": _PLAIN
    | {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "qwen2": _PLAIN | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, windows": _PLAIN
    | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": _PLAIN | {"model_type": "qwen3", "head_dim": 32},
    "gemma2": _GEMMA
    | {
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3": _GEMMA
    | {"model_type": "gemma3_text", "num_hidden_layers": 7, "query_pre_attn_scalar": 32},
    "gemma3, scaled": _GEMMA
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": [SLIDING, FULL, SLIDING],
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": None,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        },
    },
    "gemma4": _GEMMA
    | {
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 7,
        "layer_types": _GEMMA4_TYPES,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "gemma4, shared": _GEMMA
    | {
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 7,
        "layer_types": _GEMMA4_TYPES,
        "global_head_dim": 48,
        "num_kv_shared_layers": 3,
    },
}
# Those that a GGUF file can describe: llama.cpp has some constants of Gemma 3 in code.
IN_GGUF = (
    "llama 2",
    "llama 3",
    "llama, linear",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4, shared",
)


def family_arch(name: str, **changes: Any) -> Arch:
    """Return the decoder that a configuration describes, with some of its keys changed."""
    config = CONFIGS[name] | changes
    return MODEL_TYPES[config["model_type"]].describe(Keys(config))


def random_weights(arch: Arch, seed: int = 0) -> dict[str, F32]:
    """Draw weights by role, such that activations keep an ordinary size."""
    random = np.random.default_rng(seed)
    weights: dict[str, F32] = {}
    for role, shape in tensor_shapes(arch).items():
        if len(shape) == 2:
            gain = np.float32(1.5 / shape[1] ** 0.5)
            if role == EMBEDDING:  # what scaled embeddings say would drown the layers
                gain /= np.float32(arch.embedding_scale)
            weights[role] = random.standard_normal(shape, dtype=np.float32) * gain
        elif role.endswith("bias"):
            weights[role] = random.standard_normal(shape, dtype=np.float32) * np.float32(0.3)
        else:
            weights[role] = random.uniform(0.6, 1.1, shape).astype(np.float32)
    return weights


class MemorySource:
    """Tensors that are at hand, by role, as a `Source`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in tensors.items()
        }

    @contextmanager
    def open(self) -> Iterator[TensorReader]:
        yield MemoryReader(self._tensors)


class MemoryReader:
    """A `TensorReader` of tensors that are at hand."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __call__(self, name: str) -> Tensor:
        return self._tensors[name]

    def rows(self, name: str, low: int, high: int) -> Tensor:
        return self._tensors[name].rows(low, high)


def random_checkpoint(arch: Arch, *, kind: str = "f32", seed: int = 0) -> Checkpoint:
    """Return a random model in memory.

    Args:
        kind: of every matrix, one of `tests.tiny` or of `tests.quantized`; those that it has no
            whole unit of columns for are Q8_0, as a GGUF file would have something else there.
    """
    tensors: dict[str, Tensor] = {
        role: DenseTensor(values=values, dtype="f32")
        if values.ndim == 1
        else quantize(values, kind)
        if kind in KINDS
        else _of_kind(arch, role, values.shape, kind, seed)
        for role, values in random_weights(arch, seed).items()
    }
    return Checkpoint(
        arch=arch, source=MemorySource(tensors), names={role: role for role in tensors}
    )


def _of_kind(arch: Arch, role: str, shape: tuple[int, ...], kind: str, seed: int) -> Tensor:
    """Draw a matrix in one of the formats' own kinds, of the size that `random_weights` has."""
    n, k = shape
    own = QUANTIZED[kind]
    unit = 256 if own["numbers"] in ("u8", "i8") else own["group"]
    gain = 1.5 / (arch.embedding_scale if role == EMBEDDING else 1.0)
    seeds = zlib.crc32(f"{seed} {role}".encode())
    return random_matrix(n, k, **(QUANTIZED["Q8_0"] if k % unit else own), gain=gain, seed=seeds)


def write_mlx_folder(
    folder: Path, name: str, weights: Mapping[str, F32], quantization: Mapping[str, Any]
) -> Path:
    """Write a folder as MLX has it, without a tokenizer."""
    write_mlx(folder, _as_stored(name, weights), quantization, config=CONFIGS[name])
    return folder


def _as_stored(name: str, weights: Mapping[str, F32]) -> dict[str, F32]:
    """Return weights by their names in a folder, norms as the family stores them."""
    family = MODEL_TYPES[CONFIGS[name]["model_type"]]
    stored = {}
    for role, values in weights.items():
        shift = family.norm_shift if role.rpartition(".")[2].endswith("norm") else 0.0
        stored[folder_name(role, family.layer_names)] = values - np.float32(shift)
    return stored


def write_folder(
    folder: Path, name: str, weights: Mapping[str, F32], *, dtype: str = "f32", shards: int = 1
) -> Path:
    """Write a folder as Hugging Face has it, without a tokenizer."""
    config, arch = CONFIGS[name], family_arch(name)
    stored: dict[str, Any] = dict(_as_stored(name, weights))
    if dtype == "f16":
        stored = {key: values.astype(np.float16) for key, values in stored.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return folder
    places = {key: f"model-{i % shards}.safetensors" for i, key in enumerate(stored)}
    for place in set(places.values()):
        part = {key: values for key, values in stored.items() if places[key] == place}
        save_file(part, folder / place)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert arch.num_layers
    return folder


def write_zeros_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Write a folder of float16 zeros, of any size."""
    family = MODEL_TYPES[config["model_type"]]
    stored = {
        folder_name(role, family.layer_names): np.zeros(shape, np.float16)
        for role, shape in tensor_shapes(family.describe(Keys(config))).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    return folder


def peak_of_loading(folder: Path, kind: str, backend: Any) -> int:
    """Return the most bytes of Python's own that were held while a back end took a folder of zeros.

    Its output matrix is far larger than all else. `kind` is how the matrices are rounded.
    """
    write_zeros_folder(folder, CONFIGS["llama 2"] | {"vocab_size": 1 << 16, "hidden_size": 256})
    checkpoint = dataclasses.replace(read_folder(folder).checkpoint, quantize=kind)
    tracemalloc.start()
    try:
        load_decoder(checkpoint, backend)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def folder_name(role: str, layer_names: Mapping[str, str]) -> str:
    """Return what a Hugging Face folder calls a role."""
    tops = {EMBEDDING: "model.embed_tokens.weight", NORM: "model.norm.weight"}
    tops[OUTPUT] = "lm_head.weight"
    if role in tops:
        return tops[role]
    _, index, tail = role.split(".")
    return f"model.layers.{index}.{layer_names[tail]}"


def write_family_gguf(
    path: Path, name: str, weights: Mapping[str, F32], changes: Mapping[str, Any] | None = None
) -> Path:
    """Write a GGUF file as llama.cpp's converter would, with float32 tensors.

    Args:
        changes: keys of the architecture that are otherwise; None leaves one out.
    """
    arch = family_arch(name)
    keys, extra = _gguf_keys(CONFIGS[name], arch)
    metadata = {"general.architecture": arch.family, **toy_tokenizer()}
    keys |= changes or {}
    metadata |= {f"{arch.family}.{key}": v for key, v in keys.items() if v is not None}
    tops = {EMBEDDING: "token_embd.weight", NORM: "output_norm.weight", OUTPUT: "output.weight"}
    entries = []
    for role, values in {**weights, **extra}.items():
        stored, tensor_name = values, tops.get(role, role)
        if role.startswith("layers."):
            _, index, tail = role.split(".")
            tensor_name = f"blk.{index}.{BLOCK[tail]}"
            if arch.family == "llama" and tail in ("q", "k"):
                stored = _interleaved(values, arch.attention[int(index)].head_dim)
        data = np.ascontiguousarray(stored, dtype=np.float32).tobytes()
        entries.append(Entry(tensor_name, stored.shape[::-1], data=data))
    path.write_bytes(gguf_bytes(metadata, entries))
    return path


def _interleaved(matrix: F32, head_dim: int) -> F32:
    """Reorder rows so that the pair (i, i + D/2) of a head becomes (2i, 2i+1)."""
    heads = matrix.reshape(-1, 2, head_dim // 2, matrix.shape[1])
    return np.ascontiguousarray(heads.transpose(0, 2, 1, 3)).reshape(matrix.shape)


def _gguf_keys(config: Mapping[str, Any], arch: Arch) -> tuple[dict[str, Any], dict[str, F32]]:
    """Return the keys of the architecture and tensors that only the format has."""
    first, full = arch.attention[0], arch.attention[-1]
    keys: dict[str, Any] = {
        "block_count": arch.num_layers,
        "context_length": arch.context_len,
        "embedding_length": arch.hidden_size,
        "feed_forward_length": arch.ffn_size,
        "attention.head_count": first.num_heads,
        "attention.head_count_kv": first.num_kv_heads,
        "attention.layer_norm_rms_epsilon": arch.norm_eps,
        "attention.key_length": first.head_dim,
        "attention.value_length": first.head_dim,
        "rope.dimension_count": first.head_dim,
    }
    extra: dict[str, F32] = {}
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** (-np.arange(0, first.head_dim, 2) / first.head_dim)
        extra["rope_freqs.weight"] = (plain / np.array(first.frequencies)).astype(np.float32)
    keys["rope.freq_base"] = rope.get("rope_theta", 10000.0)
    if arch.family.startswith("gemma"):
        theta = 1e4 if arch.family == "gemma2" else 1e6
        keys |= {"rope.freq_base": theta, "attention.sliding_window": WINDOW}
        if first.softcap:
            keys["attn_logit_softcapping"] = first.softcap
        if arch.logit_softcap:
            keys["final_logit_softcapping"] = arch.logit_softcap
    if arch.family == "gemma4":
        slides = [int(attention.window > 0) for attention in arch.attention]
        turning = full.head_dim // 8
        factors = [1.0] * turning + [1e30] * (full.head_dim // 2 - turning)
        extra["rope_freqs.weight"] = np.array(factors, np.float32)
        keys |= {
            "attention.key_length": full.head_dim,
            "attention.value_length": full.head_dim,
            "attention.key_length_swa": first.head_dim,
            "attention.value_length_swa": first.head_dim,
            "rope.dimension_count": full.head_dim,
            "rope.dimension_count_swa": first.head_dim,
            "rope.freq_base_swa": 1e4,
            "attention.head_count_kv": [item.num_kv_heads for item in arch.attention],
            "attention.sliding_window_pattern": _bools(slides),
            "attention.shared_kv_layers": config.get("num_kv_shared_layers", 0),
            "embedding_length_per_layer_input": 0,
        }
    return keys, extra


def _bools(values: list[int]) -> bytes:
    """Return a typed array of bools."""
    return struct.pack(f"<IIQ{len(values)}B", 9, 7, len(values), *values)
