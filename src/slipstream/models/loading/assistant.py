"""Checkpoints of an assistant: the small head that drafts from its target's own KV.

A folder holds `config.json`, which `models.loading.assistant_config` reads, and
`model.safetensors`. Everything is checked before anything is used: each tensor of the shape that
the configuration implies, `vocab_map` ascending, `members` in equal clusters, and the target the
very one that the head was trained on. How tensors are stored is said in
`models.loading.assistant_tensors`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import LoadError, MismatchError
from slipstream.models.arch import Arch
from slipstream.models.head import HeadArch, VocabClusters
from slipstream.models.loading.assistant_config import (
    CONFIG_FILE,
    TYPE,
    VERSION,
    AssistantConfig,
    AssistantTarget,
    check_config,
    read_config,
)
from slipstream.models.loading.assistant_tensors import GROUP, I32, load_tensors, save_tensors
from slipstream.models.weights import F32, Tensor

TENSORS_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Assistant:
    """A checkpoint's content.

    Attributes:
        config: its shape.
        tensors: norm weights and matrices, named as `vector_shapes` and `matrix_shapes` say.
        vocab_map: int32 of shape (W,), the ascending target ids of the draft vocabulary.
        clusters: how it is clustered, if it is.
    """

    config: AssistantConfig
    tensors: Mapping[str, Tensor]
    vocab_map: I32
    clusters: VocabClusters | None = None

    @property
    def head(self) -> HeadArch:
        """What the draft needs to know of it."""
        config, layers = self.config, len(self.config.kv_layers)
        return HeadArch(
            num_heads=(config.num_heads,) * layers,
            kv_layers=config.kv_layers,
            feature_layers=config.feature_layers,
            norm_eps=config.target.norm_eps,
            max_k=config.max_k,
            embedding_scale=config.embedding_scale,
            scales=(1.0,) * layers,
            windows=(0,) * layers,
        )


def read_assistant(path: str | os.PathLike[str], arch: Arch, fingerprint: str) -> Assistant:
    """Read a checkpoint for a target.

    Args:
        path: the folder.
        arch: the target's decoder.
        fingerprint: the target's `ModelFile.fingerprint`.

    Raises:
        LoadError: the folder is missing or damaged, or a key or tensor is not as it must be.
        MismatchError: it was made for another target; both values are named.
    """
    path = Path(path)
    try:
        config = read_config(path / CONFIG_FILE)
        _check_target(config.target, AssistantTarget.of(arch, fingerprint))
        tensors, maps = load_tensors(
            path / TENSORS_FILE,
            config.vector_shapes(),
            config.matrix_shapes(),
            config.map_sizes(),
            config.bits,
        )
        _check_maps(maps, config)
    except LoadError as error:
        raise type(error)(f"{path}: {error.message}", hint=error.hint) from error
    clusters = None
    if config.clusters is not None:
        clusters = VocabClusters(members=maps["members"], top=config.clusters.top)
    return Assistant(config=config, tensors=tensors, vocab_map=maps["vocab_map"], clusters=clusters)


def write_assistant(
    path: str | os.PathLike[str],
    config: AssistantConfig,
    tensors: Mapping[str, F32],
    vocab_map: I32,
    training: Mapping[str, Any] | None = None,
    members: I32 | None = None,
) -> None:
    """Write a checkpoint; matrices are rounded to `config.bits`, or to float16 where that is None.

    Args:
        path: the folder; it is made.
        tensors: float32, named and shaped as `vector_shapes` and `matrix_shapes` say.
        vocab_map: ascending target ids of shape (W,).
        training: how the head was made, kept in the configuration.
        members: int32 of shape (W,), each draft token's cluster; wanted where there are clusters.

    Raises:
        LoadError: a tensor is missing, unknown, misshapen or holds an infinity or NaN.
    """
    path = Path(path)
    check_config(config)
    maps = {"vocab_map": vocab_map} | ({} if members is None else {"members": members})
    _check_maps(maps, config)
    path.mkdir(parents=True, exist_ok=True)
    save_tensors(
        path / TENSORS_FILE,
        tensors,
        config.vector_shapes(),
        config.matrix_shapes(),
        maps,
        config.bits,
    )
    fields = dataclasses.asdict(config)
    bits = fields.pop("bits")
    quantization = None if bits is None else {"bits": bits, "group": GROUP}
    block = {"type": TYPE, "version": VERSION, **fields, "quantization": quantization}
    if training is not None:
        block["training"] = dict(training)
    text = json.dumps(block, indent=1, allow_nan=False)
    (path / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _check_target(made_for: AssistantTarget, served: AssistantTarget) -> None:
    # The hash last: a difference of shape says more.
    names = [field.name for field in dataclasses.fields(AssistantTarget)]
    for name in [*names[1:], names[0]]:
        ours, theirs = getattr(made_for, name), getattr(served, name)
        if ours != theirs:
            raise MismatchError(
                f"the assistant was made for a target with {name} {ours!r}, this one has "
                f"{theirs!r}",
                hint="make one for this model: slipstream distill MODEL --out DIR",
            )


def _check_maps(maps: Mapping[str, I32], config: AssistantConfig) -> None:
    for name in sorted(maps.keys() ^ config.map_sizes().keys()):
        raise LoadError(f"{name} is {'unexpected' if name in maps else 'missing'}")
    for name, size in config.map_sizes().items():
        ids = maps[name]
        if ids.dtype != np.int32 or ids.shape != (size,):
            raise LoadError(
                f"{name} must be int32 of shape [{size}], "
                f"got {ids.dtype} of shape {list(ids.shape)}"
            )
    ids, last = maps["vocab_map"], config.target.vocab_size - 1
    if ids[0] < 0 or ids[-1] > last or (np.diff(ids) <= 0).any():
        raise LoadError(f"vocab_map must ascend within [0, {last}]")
    if config.clusters is None:
        return
    count = config.clusters.count
    each = np.arange(count).repeat(config.draft_vocab_size // count)
    if not (np.sort(maps["members"]) == each).all():
        raise LoadError(f"members must part the vocabulary into {count} equal clusters")
