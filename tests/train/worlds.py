"""A tiny target in torch, and a tiny model file that converses, for tests of distillation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.models.arch import Arch
from slipstream.models.loading.checkpoint import EMBEDDING, NORM, OUTPUT
from slipstream.train.head import Head, Weights
from slipstream.train.target import TargetModel
from slipstream.train.turns import TurnScript
from tests.assistants import random_assistant
from tests.tiny import ARCH, ROPE_THETA, TinyTensors, tiny_tensors

CPU = torch.device("cpu")
SCRIPT = TurnScript(
    to_reply=(2, 5, 6), to_user=(3, 7), stop_ids=frozenset({2, 3}), banned_ids=(0, 1)
)


def tiny_target(
    tensors: TinyTensors | None = None, max_len: int = 256, device: torch.device = CPU
) -> TargetModel:
    """Return a tiny target as training sees it."""
    tensors = tiny_tensors() if tensors is None else tensors
    named = {EMBEDDING: tensors.embedding, NORM: tensors.norm}
    if not tensors.arch.tied_embedding:
        named[OUTPUT] = tensors.output
    for index, layer in enumerate(tensors.layers):
        for role, tensor in vars(layer).items():
            named[f"layers.{index}.{role}"] = tensor
    weights = {
        name: torch.from_numpy(np.ascontiguousarray(tensor.dequantize()))
        for name, tensor in named.items()
    }
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return TargetModel(tensors.arch, weights, device=device, dtype=dtype, max_len=max_len)


def tiny_head(arch: Arch = ARCH, seed: int = 0) -> tuple[Head, dict[str, Tensor], Tensor]:
    """Return a random head, its weights and its vocabulary map."""
    config, tensors, vocab_map = random_assistant(arch, "ab" * 16, seed=seed)
    weights = {name: torch.from_numpy(value) for name, value in tensors.items()}
    return Head(config, arch, CPU), weights, torch.from_numpy(vocab_map).long()


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    """Return token ids of shape (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(ARCH.vocab_size, (batch, length), generator=generator)


def drafts_one_by_one(
    head: Head,
    weights: Weights,
    target: TargetModel,
    vocab_map: Tensor,
    ids: Tensor,
    p: int,
    k: int,
) -> list[int]:
    """Draft from the anchor at position p of one sequence, in float64, as the format defines it."""
    arch, heads, config = target.arch, target.attention, head.config
    w = {name: value.double() for name, value in weights.items()}
    trace = target.forward(ids[None], config.feature_layers, config.kv_layers)

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean() + arch.norm_eps).sqrt() * weight

    state = sum(
        w[f"features.{i}.weight"] @ rms(h[0, p - 1].double(), w[f"features.{i}.norm"])
        for i, h in enumerate(trace.features)
    )
    token, drafts = int(ids[p]), []
    for j in range(k):
        x = w["embed.weight"] @ rms(target.embedding[token].double(), w["embed.norm"])
        x = x + w["state.weight"] @ rms(state, w["state.norm"])
        angles = (p + j) * ROPE_THETA ** (
            -2 * torch.arange(heads.head_dim // 2).double() / heads.head_dim
        )
        for n, (keys, values) in enumerate(trace.kv):
            q = (w[f"layers.{n}.q"] @ rms(x, w[f"layers.{n}.attn_norm"])).view(-1, heads.head_dim)
            a, b = q[:, 0::2], q[:, 1::2]
            q = torch.stack(
                [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], 2
            ).flatten(1)
            mixed = []
            for number, query in enumerate(q):
                kv_head = number // (len(q) // heads.num_kv_heads)
                scores = keys[0, kv_head, :p].double() @ query / heads.head_dim**0.5
                mixed.append(scores.softmax(0) @ values[0, kv_head, :p].double())
            x = x + w[f"layers.{n}.attn_out"] @ torch.cat(mixed)
            y = rms(x, w[f"layers.{n}.ffn_norm"])
            gate = w[f"layers.{n}.gate"] @ y
            x = x + w[f"layers.{n}.down"] @ (gate * gate.sigmoid() * (w[f"layers.{n}.up"] @ y))
        y = rms(x, w["norm"])
        state = w["post"] @ y
        token = int(vocab_map[(w["output"] @ y).argmax()])
        drafts.append(token)
    return drafts
