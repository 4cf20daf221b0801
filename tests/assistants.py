"""A random assistant for tests, and its checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slipstream.models.arch import Arch
from slipstream.models.head import I32
from slipstream.models.loading.assistant import write_assistant
from slipstream.models.loading.assistant_config import (
    AssistantConfig,
    AssistantTarget,
    ClusterCounts,
)
from slipstream.models.weights import F32


def random_assistant(
    arch: Arch,
    fingerprint: str,
    *,
    hidden_size: int = 32,
    num_heads: int | None = None,
    ffn_size: int = 64,
    feature_layers: tuple[int, ...] | None = None,
    kv_layers: tuple[int, ...] | None = None,
    draft_vocab_size: int = 50,
    max_k: int = 8,
    bits: int | None = 4,
    lean: bool = False,
    clusters: tuple[int, int] | None = None,
    seed: int = 0,
) -> tuple[AssistantConfig, dict[str, F32], np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Draw an assistant for a target: its configuration, float32 tensors and vocabulary map.

    By default it reads the residual stream after the first and the last layer, and the KV of the
    first and the last layer.

    Args:
        clusters: how many the vocabulary has, and how many are looked into; see `members_of`.
    """
    last = arch.num_layers
    config = AssistantConfig(
        target=AssistantTarget.of(arch, fingerprint),
        hidden_size=hidden_size,
        num_heads=arch.uniform.num_heads if num_heads is None else num_heads,
        ffn_size=ffn_size,
        feature_layers=(1, last) if feature_layers is None else feature_layers,
        kv_layers=(0, last - 1) if kv_layers is None else kv_layers,
        draft_vocab_size=draft_vocab_size,
        max_k=max_k,
        bits=bits,
        lean=lean,
        embedding_scale=1.5 if lean else 1.0,
        clusters=None if clusters is None else ClusterCounts(count=clusters[0], top=clusters[1]),
    )
    random = np.random.default_rng(seed)
    tensors: dict[str, F32] = {
        name: random.uniform(0.5, 1.5, shape).astype(np.float32)
        for name, shape in config.vector_shapes().items()
    }
    for name, (n, k) in config.matrix_shapes().items():
        gain = np.float32((2.0 if name.endswith(".q") else 1.0) / k**0.5)
        tensors[name] = random.standard_normal((n, k), dtype=np.float32) * gain
    ids = random.choice(arch.vocab_size, draft_vocab_size, replace=False)
    return config, tensors, np.sort(ids).astype(np.int32)


def members_of(config: AssistantConfig) -> I32 | None:
    """Draw the clusters of a random assistant's vocabulary."""
    if config.clusters is None:
        return None
    count = config.clusters.count
    each = np.arange(count, dtype=np.int32).repeat(config.draft_vocab_size // count)
    return np.random.default_rng(count).permutation(each)


def write_random_assistant(path: Path, arch: Arch, fingerprint: str, **options: object) -> Path:
    """Write a random assistant's checkpoint and return its folder."""
    made = random_assistant(arch, fingerprint, **options)  # type: ignore[arg-type]
    write_assistant(path, *made, members=members_of(made[0]))
    return path
