"""Decoders of real shapes with random weights, drawn on the GPU in packed form in seconds.

Random weights cost what trained ones cost; what they accept of a draft says nothing. 4-bit codes in
groups of 64 columns, each with a scale and a bias, as MLX and others keep models of this size.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from slipstream.bench.synthetic import SHAPES
from slipstream.config import EngineConfig
from slipstream.engine.target import Target, build_target
from slipstream.kernels.cuda import compiler
from slipstream.kernels.cuda.backend import CudaBackend
from slipstream.kernels.cuda.layout import Layout, cut_columns
from slipstream.kernels.cuda.linear import CudaWeight, Segment
from slipstream.kernels.cuda.linear_kernels import LinearKernels
from slipstream.kernels.ops import Step
from slipstream.models.arch import Arch
from slipstream.models.decoder import DecoderWeights, LayerWeights, forward
from slipstream.models.loading.names import cache_dir
from slipstream.models.weights import DenseTensor

CUBINS = cache_dir() / "kernels"
# Codes are uniform in 0..15: their standard deviation.
_CODE_DEVIATION = 4.61
_MIDDLE_CODE = 7.5


@dataclass(frozen=True)
class RandomModel:
    """A target and the weights behind it, for further steps over the same pages."""

    target: Target
    weights: DecoderWeights

    def step_with(
        self,
        kernel: str = "auto",
        tile_m: int = 16,
        *,
        max_rows: int = 128,
        max_logits: int = 64,
    ) -> Step:
        """Return a step whose products run on one kernel."""
        backend = CudaBackend(kernel=kernel, tile_m=tile_m, cache=CUBINS)
        arch, kv = self.target.arch, self.target.kv
        return backend.compile(
            lambda ops: forward(ops, arch, self.weights, kv),
            max_rows=max_rows,
            max_logits=max_logits,
        )


def random_model(shape: str, config: EngineConfig, *, seed: int = 0) -> RandomModel:
    """Return a model of a shape's size on the GPU, its KV pages full of random numbers."""
    arch = SHAPES[shape]
    backend = CudaBackend(kernel=config.verify_kernel, tile_m=config.tile_m, cache=CUBINS)
    draw = torch.Generator("cuda").manual_seed(seed)
    weights = _weights(arch, backend, draw)
    target = build_target(arch, backend, lambda _: weights, config)
    for layer in target.kv.pages.values():  # type: ignore[attr-defined]
        layer.normal_(generator=draw)
    return RandomModel(target, weights)


def weight_bytes_of_a_step(target: Target) -> int:
    """Return the bytes of weights that a step reads; of the embedding, only if it is the output."""
    arch, total = target.arch, target.backend.weight_bytes()
    if arch.tied_embedding:
        return total
    return total - packed_layout(arch.vocab_size, arch.hidden_size).num_bytes


def _weights(arch: Arch, backend: CudaBackend, draw: torch.Generator) -> DecoderWeights:
    attention = arch.uniform
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    kernels: dict[Layout, LinearKernels] = {}

    def matrix(n: int, k: int, gain: float = 1.0) -> CudaWeight:
        layout = packed_layout(n, k)
        if layout not in kernels:
            kernels[layout] = LinearKernels(layout, compiler.current_device(), CUBINS)
        packed = _random_bytes(layout, gain, draw)
        weight = CudaWeight(n=n, k=k, segments=(Segment(layout, 0, packed, kernels[layout]),))
        backend.adopt(weight)
        return weight

    def norm() -> torch.Tensor:
        ones = torch.ones(arch.hidden_size).numpy()
        return backend.vector(DenseTensor(values=ones, dtype="f32"))

    layers = tuple(
        LayerWeights(
            attn_norm=norm(),
            qkv=matrix((heads + 2 * kv_heads) * dim, arch.hidden_size, 1.5),
            attn_out=matrix(arch.hidden_size, heads * dim),
            ffn_norm=norm(),
            gate_up=matrix(2 * arch.ffn_size, arch.hidden_size),
            down=matrix(arch.hidden_size, arch.ffn_size),
        )
        for _ in range(arch.num_layers)
    )
    embedding = matrix(arch.vocab_size, arch.hidden_size, 4.0)
    tied = arch.tied_embedding
    output = embedding if tied else matrix(arch.vocab_size, arch.hidden_size, 4.0)
    return DecoderWeights(embedding=embedding, layers=layers, norm=norm(), output=output)


def packed_layout(n: int, k: int) -> Layout:
    """Return the layout of a 4-bit matrix with biases and groups of 64."""
    splits, warps, chunks = cut_columns(k)
    return Layout(
        n=n,
        k=k,
        kind=4,
        group=64,
        zero=0,
        has_bias=True,
        splits=splits,
        warps=warps,
        chunks=chunks,
    )


def _random_bytes(layout: Layout, gain: float, draw: torch.Generator) -> torch.Tensor:
    """Draw codes, scales and biases in place; an output's variance is gain**2 times the input's."""
    shape = (layout.num_bytes // layout.piece_bytes, layout.piece_bytes)
    pieces = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8, generator=draw)
    at = layout.piece_chunks * layout.code_bytes
    pairs = torch.empty(pieces[:, at:].numel() // 4, 2, dtype=torch.float16, device="cuda")
    pairs[:, 0].uniform_(0.5, 1.5, generator=draw)
    pairs[:, 0] *= gain / (_CODE_DEVIATION * layout.k**0.5)
    pairs[:, 1] = -_MIDDLE_CODE * pairs[:, 0]
    pieces[:, at:] = pairs.view(torch.uint8).view(len(pieces), -1)
    return pieces.view(-1)
