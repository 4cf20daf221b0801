"""A tiny random decoder for tests, on any back end, in any weight kind."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.kernels.ops import Backend, KVCache, Rows, Step
from slipstream.models.arch import Arch, AttentionArch, plain_frequencies, score_scale
from slipstream.models.decoder import DecoderWeights, LayerWeights, forward
from slipstream.models.weights import DenseTensor, QuantizedTensor, Tensor

BACKENDS = ("reference", "cpu-avx512", "cpu-portable")  # each instruction path forced
KINDS = ("q4_1", "q4_0", "q8_0", "f32", "f16", "bf16")

ROPE_THETA = 10000.0
_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rope_interleaved": True}
_SHAPE = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_size": 96,
    "vocab_size": 97,
    "context_len": 512,
    "norm_eps": 1e-5,
    "tied_embedding": True,
}


def tiny_arch(*, rope_theta: float = ROPE_THETA, **changes: Any) -> Arch:
    """Return the tiny shape with some fields changed, those of every layer's attention included."""
    names = {item.name for item in dataclasses.fields(AttentionArch)}
    heads: dict[str, Any] = _HEADS | {k: v for k, v in changes.items() if k in names}
    fields: dict[str, Any] = _SHAPE | {k: v for k, v in changes.items() if k not in names}
    plain = {
        "frequencies": plain_frequencies(heads["head_dim"], rope_theta),
        "scale": score_scale(heads["head_dim"]),
    }
    layers = fields["num_layers"]
    own = {"attention": (AttentionArch(**(plain | heads)),) * layers}
    return Arch(**(own | {"kv_layers": tuple(range(layers))} | fields))


ARCH = tiny_arch()


def make_backend(name: str, **options: Any) -> Backend:
    """Return a back end ("cpu-PATH" forces an instruction path), skipping where it is not built."""
    if name == "cuda":
        return make_cuda_backend(**options)
    if name == "reference":
        pytest.importorskip("torch", reason="the reference back end needs torch")
        from slipstream.kernels.reference import ReferenceBackend

        return ReferenceBackend(**options)
    try:
        from slipstream.kernels.cpu import CpuBackend
    except ImportError as error:
        pytest.skip(f"the cpu back end is not built: {error}")
    try:
        return CpuBackend(isa=name.removeprefix("cpu-"), **options)
    except ConfigError as error:
        pytest.skip(str(error))


def make_cuda_backend(**options: Any) -> Backend:
    """Return the CUDA back end, skipping where there is no GPU."""
    pytest.importorskip("torch", reason="the cuda back end needs torch")
    from slipstream.kernels.cuda.device import has_device

    if not has_device():
        pytest.skip("there is no CUDA device")
    from slipstream.kernels.cuda.backend import CudaBackend

    # Shared by all tests of a machine: each would compile the same kernels for seconds.
    return CudaBackend(cache=Path(tempfile.gettempdir()) / "slipstream-test-kernels", **options)


@dataclass(frozen=True)
class TinyLayer:
    """Canonical tensors of one layer."""

    attn_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attn_out: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class TinyTensors:
    """Canonical tensors of a whole decoder; `output` is the embedding where tied."""

    arch: Arch
    embedding: Tensor
    layers: tuple[TinyLayer, ...]
    norm: Tensor
    output: Tensor


def quantize(values: np.ndarray, kind: str) -> Tensor:
    """Round a float32 matrix of shape (N, K) to `kind`, groups of 32 columns."""
    if kind == "f32":
        return DenseTensor(values=values, dtype="f32")
    if kind == "f16":
        return DenseTensor(values=values.astype(np.float16), dtype="f16")
    if kind == "bf16":
        return DenseTensor(values=(values.view(np.uint32) >> 16).astype(np.uint16), dtype="bf16")
    bits, zero = {"q4_1": (4, 0), "q4_0": (4, 8), "q8_0": (8, 128)}[kind]
    groups = values.reshape(len(values), -1, 32)
    if kind == "q4_1":
        low = groups.min(axis=2, keepdims=True)
        scale = ((groups.max(axis=2, keepdims=True) - low) / 15).astype(np.float16)
        bias = low.astype(np.float16)
    else:
        low = np.float32(0)
        scale = (np.abs(groups).max(axis=2, keepdims=True) / (zero - 1)).astype(np.float16)
        bias = None
    safe = np.where(scale == 0, 1, scale).astype(np.float32)
    codes = np.clip(np.rint((groups - low) / safe) + zero, 0, 2**bits - 1).astype(np.uint8)
    return QuantizedTensor(
        bits=bits,
        codes=codes.reshape(values.shape),
        zero=zero,
        scale=scale[:, :, 0],
        bias=None if bias is None else bias[:, :, 0],
    )


def tiny_tensors(arch: Arch = ARCH, *, kind: str = "q4_1", seed: int = 0) -> TinyTensors:
    """Draw a random decoder whose activations keep an ordinary size.

    Args:
        kind: one of KINDS, for every matrix; norms are float32.
    """
    random = np.random.default_rng(seed)
    q_width, kv_width = arch.uniform.q_size, arch.uniform.kv_size

    def matrix(n: int, k: int, gain: float = 1.0) -> Tensor:
        values = random.standard_normal((n, k), dtype=np.float32) * np.float32(gain / k**0.5)
        return quantize(values, kind)

    def vector() -> Tensor:
        values = random.uniform(0.5, 1.5, arch.hidden_size).astype(np.float32)
        return DenseTensor(values=values, dtype="f32")

    layers = tuple(
        TinyLayer(
            attn_norm=vector(),
            q=matrix(q_width, arch.hidden_size, 2.0),
            k=matrix(kv_width, arch.hidden_size, 2.0),
            v=matrix(kv_width, arch.hidden_size),
            attn_out=matrix(arch.hidden_size, q_width),
            ffn_norm=vector(),
            gate=matrix(arch.ffn_size, arch.hidden_size),
            up=matrix(arch.ffn_size, arch.hidden_size),
            down=matrix(arch.hidden_size, arch.ffn_size),
        )
        for _ in range(arch.num_layers)
    )
    embedding = matrix(arch.vocab_size, arch.hidden_size)
    tied = arch.tied_embedding
    output = embedding if tied else matrix(arch.vocab_size, arch.hidden_size)
    return TinyTensors(arch, embedding, layers, vector(), output)


def tiny_weights(backend: Backend, tensors: TinyTensors) -> DecoderWeights:
    """Repack canonical tensors on a back end, fused as the loaders fuse them."""
    layers = tuple(
        LayerWeights(
            attn_norm=backend.vector(layer.attn_norm),
            qkv=backend.matrix([layer.q, layer.k, layer.v]),
            attn_out=backend.matrix([layer.attn_out]),
            ffn_norm=backend.vector(layer.ffn_norm),
            gate_up=backend.matrix([layer.gate, layer.up]),
            down=backend.matrix([layer.down]),
        )
        for layer in tensors.layers
    )
    embedding = backend.matrix([tensors.embedding])
    tied = tensors.arch.tied_embedding
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        norm=backend.vector(tensors.norm),
        output=embedding if tied else backend.matrix([tensors.output]),
    )


@dataclass(frozen=True)
class TinyModel:
    """A decoder compiled on a back end, with pages of its own."""

    arch: Arch
    backend: Backend
    kv: KVCache
    step: Step


def tiny_model(
    backend: Backend, tensors: TinyTensors, *, num_pages: int = 32, max_rows: int = 64
) -> TinyModel:
    """Compile a tiny decoder on a back end."""
    arch = tensors.arch
    weights = tiny_weights(backend, tensors)
    kv = backend.kv_cache(arch, num_pages, arch.context_len)
    step = backend.compile(
        lambda ops: forward(ops, arch, weights, kv), max_rows=max_rows, max_logits=max_rows
    )
    return TinyModel(arch, backend, kv, step)


def make_rows(
    token_ids: Sequence[int],
    positions: Sequence[int],
    page_table: Sequence[Sequence[int]],
    *,
    sequences: Sequence[int] | None = None,
    logit_rows: Sequence[int] | None = None,
) -> Rows:
    """Return Rows from plain lists; by default one sequence, and logits of every live row."""
    live = [r for r, position in enumerate(positions) if position >= 0]
    return Rows(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        sequences=np.array([0] * len(token_ids) if sequences is None else sequences, np.int32),
        page_table=np.array(page_table, np.int32),
        logit_rows=np.array(live if logit_rows is None else logit_rows, np.int32),
    )


# Variables that tests of the command line leave as they are.
KEPT_VARIABLES = ("SLIPSTREAM_CACHE_DIR", "SLIPSTREAM_PROFILE")
