"""What an assistant's `config.json` holds: the head's shape and the target that it was made for.

Every key is checked, known and present; "lean", "embedding_scale" and "clusters" may be left out.
The free-form block "training" is for readers and not looked at.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import LoadError
from slipstream.models.arch import Arch, AttentionArch, plain_frequencies
from slipstream.models.loading.assistant_tensors import GROUP

TYPE, VERSION = "slipstream-assistant", 1
CONFIG_FILE = "config.json"
_MAX_WIDTH, _MAX_LAYERS, _MAX_DRAFTED = 1 << 20, 64, 15  # wider than any head, or than a round
_OPTIONAL = {"lean": False, "embedding_scale": 1.0, "clusters": None}


@dataclass(frozen=True, kw_only=True)
class AssistantTarget:
    """The target that a head belongs to; every field must equal the served model's.

    Attributes:
        hash: the model file's fingerprint.
        rope_theta: base of its rotation, which is that of a plain llama.
        others: as in `Arch` and `AttentionArch`.
    """

    hash: str
    family: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float

    @classmethod
    def of(cls, arch: Arch, fingerprint: str) -> AssistantTarget:
        """Describe a model.

        Raises:
            LoadError: a target that is not a plain llama; the format cannot describe it.
        """
        arch.require((), "an assistant of this format")
        attention = arch.uniform
        return cls(
            hash=fingerprint,
            family=arch.family,
            hidden_size=arch.hidden_size,
            num_layers=arch.num_layers,
            vocab_size=arch.vocab_size,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            rope_theta=_rope_theta(attention),
            norm_eps=arch.norm_eps,
        )


@dataclass(frozen=True, kw_only=True)
class ClusterCounts:
    """How a draft vocabulary is clustered.

    Attributes:
        count: clusters C of W / C tokens each.
        top: how many of them a draft step looks into.
    """

    count: int
    top: int


@dataclass(frozen=True, kw_only=True)
class AssistantConfig:
    """Shape of a head.

    Attributes:
        target: what it was made for.
        hidden_size: its own width D.
        num_heads: query heads, a multiple of the target's KV heads.
        ffn_size: width F of its gated MLPs.
        feature_layers: after how many of the target's layers each feature is taken, 1 to L.
        kv_layers: the target layer, from 0, whose KV each of the head's layers attends to.
        draft_vocab_size: W, tokens that it can draft.
        max_k: the most tokens that it may be asked to draft in a round.
        bits: 4 or 8, the width of a quantized matrix' codes; None where matrices are dense.
        lean: True leaves out the matrices "embed.weight" and "post": a token enters as the target's
            own embedding row, and the residual stream itself is handed to the next step.
        embedding_scale: multiplies the embedding rows.
        clusters: of the draft vocabulary; None where every step looks at all of it.
    """

    target: AssistantTarget
    hidden_size: int
    num_heads: int
    ffn_size: int
    feature_layers: tuple[int, ...]
    kv_layers: tuple[int, ...]
    draft_vocab_size: int
    max_k: int
    bits: int | None
    lean: bool = False
    embedding_scale: float = 1.0
    clusters: ClusterCounts | None = None

    @property
    def q_size(self) -> int:
        """Columns of a layer's queries."""
        return self.num_heads * self.target.head_dim

    def vector_shapes(self) -> dict[str, tuple[int]]:
        """Return name and shape of each norm weight."""
        hidden, own = (self.target.hidden_size,), (self.hidden_size,)
        shapes = {f"features.{i}.norm": hidden for i in range(len(self.feature_layers))}
        shapes |= {"state.norm": own, "norm": own}
        if not self.lean:
            shapes["embed.norm"] = hidden
        for n in range(len(self.kv_layers)):
            shapes |= {f"layers.{n}.attn_norm": own, f"layers.{n}.ffn_norm": own}
        return shapes

    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Return name and shape (outputs, inputs) of each matrix."""
        hidden, own, ffn = self.target.hidden_size, self.hidden_size, self.ffn_size
        shapes = {f"features.{i}.weight": (own, hidden) for i in range(len(self.feature_layers))}
        shapes["state.weight"] = (own, own)
        if not self.lean:
            shapes |= {"embed.weight": (own, hidden), "post": (own, own)}
        for n in range(len(self.kv_layers)):
            shapes |= {
                f"layers.{n}.q": (self.q_size, own),
                f"layers.{n}.attn_out": (own, self.q_size),
                f"layers.{n}.gate": (ffn, own),
                f"layers.{n}.up": (ffn, own),
                f"layers.{n}.down": (own, ffn),
            }
        if self.clusters is not None:
            shapes["centroids"] = (self.clusters.count, own)
        return shapes | {"output": (self.draft_vocab_size, own)}

    def map_sizes(self) -> dict[str, int]:
        """Return name and length of each tensor of integers."""
        names = ("vocab_map",) if self.clusters is None else ("vocab_map", "members")
        return dict.fromkeys(names, self.draft_vocab_size)


def _rope_theta(attention: AttentionArch) -> float:
    """Return the base that gives a layer's frequencies."""
    if len(attention.frequencies) < 2:
        return 1.0  # a single pair turns by the position itself, whatever the base
    near = attention.frequencies[1] ** (-attention.head_dim / 2)
    # Files hold it as a float32 or in a few digits; the power above is off by some last bits.
    for theta in (float(f"{near:.9g}"), float(np.float32(near)), near):
        if plain_frequencies(attention.head_dim, theta) == attention.frequencies:
            return theta
    raise LoadError("an assistant of this format needs a target with plain RoPE")


def read_config(path: Path) -> AssistantConfig:
    try:
        block = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{path.name} is missing", hint="name an assistant's folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(block, dict) or block.get("type") != TYPE:
        got = block.get("type") if isinstance(block, dict) else type(block).__name__
        raise LoadError(f"{path.name}: type must be {TYPE!r}, got {got!r}")
    if block.get("version") != VERSION or isinstance(block["version"], bool):
        raise LoadError(f"{path.name}: version must be {VERSION}, got {block.get('version')!r}")
    fields = {field.name for field in dataclasses.fields(AssistantConfig)} - {"bits"}
    block = {key: value for key, value in block.items() if key != "training"}
    block = _OPTIONAL | block
    _check_keys(block, fields | {"type", "version", "quantization"}, "")
    config = AssistantConfig(
        target=_read_target(block["target"]),
        hidden_size=_int(block, "hidden_size", 1, _MAX_WIDTH),
        num_heads=_int(block, "num_heads", 1, _MAX_WIDTH),
        ffn_size=_int(block, "ffn_size", 1, _MAX_WIDTH),
        feature_layers=_ints(block, "feature_layers"),
        kv_layers=_ints(block, "kv_layers"),
        draft_vocab_size=_int(block, "draft_vocab_size", 1, 1 << 31),
        max_k=_int(block, "max_k", 1, _MAX_DRAFTED),
        bits=_read_bits(block["quantization"]),
        lean=_flag(block, "lean"),
        embedding_scale=_number(block, "embedding_scale"),
        clusters=_read_clusters(block["clusters"]),
    )
    check_config(config)
    return config


def check_config(config: AssistantConfig) -> None:
    """Refuse a shape that no head of its target can have.

    Raises:
        LoadError: two values contradict each other; both are named.
    """
    target = config.target
    if config.num_heads % target.num_kv_heads:
        raise LoadError(
            f"num_heads must be a multiple of the target's {target.num_kv_heads} KV heads, "
            f"got {config.num_heads}"
        )
    for name, low, high in (("feature_layers", 1, 0), ("kv_layers", 0, -1)):
        high += target.num_layers
        layers = getattr(config, name)
        if not 1 <= len(layers) <= _MAX_LAYERS or not all(low <= x <= high for x in layers):
            raise LoadError(
                f"{name} must be 1 to {_MAX_LAYERS} numbers in [{low}, {high}], got {list(layers)}"
            )
    if config.draft_vocab_size > target.vocab_size:
        raise LoadError(
            f"draft_vocab_size must be at most the target's {target.vocab_size}, "
            f"got {config.draft_vocab_size}"
        )
    if config.lean and config.hidden_size != target.hidden_size:
        raise LoadError(
            f"a lean head is as wide as its target, {target.hidden_size}, got {config.hidden_size}"
        )
    if config.clusters is not None and config.draft_vocab_size % config.clusters.count:
        raise LoadError(
            f"draft_vocab_size must be a multiple of the {config.clusters.count} clusters, "
            f"got {config.draft_vocab_size}"
        )
    if config.clusters is not None and not 1 <= config.clusters.top <= config.clusters.count:
        raise LoadError(
            f"clusters.top must be in [1, {config.clusters.count}], got {config.clusters.top}"
        )
    if config.bits is None:
        return
    for name, (_, inputs) in config.matrix_shapes().items():
        if inputs % GROUP:
            raise LoadError(f"{name}: inputs must be a multiple of {GROUP}, got {inputs}")


def _read_target(block: Any) -> AssistantTarget:
    if not isinstance(block, dict):
        raise LoadError(f"target must be an object, got {type(block).__name__}")
    _check_keys(block, {field.name for field in dataclasses.fields(AssistantTarget)}, "target.")
    for key in ("hash", "family"):
        if not isinstance(block[key], str):
            raise LoadError(f"target.{key} must be a string, got {block[key]!r}")
    for key in ("rope_theta", "norm_eps"):
        _number(block, key, "target.")
    for key in ("hidden_size", "num_layers", "vocab_size", "num_kv_heads", "head_dim"):
        _int(block, key, 1, 1 << 31, "target.")
    return AssistantTarget(**block)


def _read_clusters(block: Any) -> ClusterCounts | None:
    if block is None:
        return None
    if not isinstance(block, dict):
        raise LoadError(f"clusters must be null or an object, got {type(block).__name__}")
    _check_keys(block, {"count", "top"}, "clusters.")
    count = _int(block, "count", 1, _MAX_WIDTH, "clusters.")
    return ClusterCounts(count=count, top=_int(block, "top", 1, count, "clusters."))


def _read_bits(block: Any) -> int | None:
    if block is None:
        return None
    if block not in ({"bits": 4, "group": GROUP}, {"bits": 8, "group": GROUP}):
        raise LoadError(
            f"quantization must be null or bits 4 or 8 in groups of {GROUP}, got {block!r}"
        )
    return int(block["bits"])


def _check_keys(block: Mapping[str, Any], known: set[str], prefix: str) -> None:
    for key in sorted(known - block.keys()):
        raise LoadError(f"{CONFIG_FILE}: {prefix}{key} is missing")
    for key in sorted(block.keys() - known):
        raise LoadError(
            f"{CONFIG_FILE}: {prefix}{key} is unknown; known are {', '.join(sorted(known))}"
        )


def _int(block: Mapping[str, Any], key: str, low: int, high: int, prefix: str = "") -> int:
    value = block[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise LoadError(f"{prefix}{key} must be an integer in [{low}, {high}], got {value!r}")
    return value


def _number(block: Mapping[str, Any], key: str, prefix: str = "") -> float:
    value = block[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise LoadError(f"{prefix}{key} must be a number above 0, got {value!r}")
    if not math.isfinite(value):
        raise LoadError(f"{prefix}{key} must be finite, got {value!r}")
    return value


def _flag(block: Mapping[str, Any], key: str) -> bool:
    if not isinstance(block[key], bool):
        raise LoadError(f"{key} must be true or false, got {block[key]!r}")
    return bool(block[key])


def _ints(block: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = block[key]
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise LoadError(f"{key} must be a list of integers, got {value!r}")
    return tuple(value)
