"""The assistants of Gemma 4: folders as Hugging Face and MLX have them, read as a head.

Such an assistant is a Gemma 4 decoder whose layers own no KV: each attends to the target's last
layer of its kind that owns one. A draft step joins the target's scaled embedding of the last token
with a state, the target's final hidden state at first and then what the post-projection returns;
its queries keep the anchor's position in every step; the last w + 1 positions before the anchor are
inside a window of w. Tokens come from its own embedding, some checkpoints looking into the best
clusters alone.

Source: `Gemma4AssistantForCausalLM` and `SinglePositionMultiTokenCandidateGenerator` of
transformers 5, which the tests compare with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import LoadError, MismatchError
from slipstream.models.arch import Arch, AttentionArch
from slipstream.models.head import I32, HeadArch, VocabClusters
from slipstream.models.loading.checkpoint import TensorReader
from slipstream.models.loading.families import GEMMA4
from slipstream.models.loading.families.family import SANDWICH_LAYER
from slipstream.models.loading.finite import is_finite
from slipstream.models.loading.folder import open_source, read_json
from slipstream.models.loading.keys import MAX_WIDTH, Keys
from slipstream.models.loading.metadata import describe
from slipstream.models.loading.safetensors_files import SafetensorsFiles, read_files
from slipstream.models.weights import BFloat16, DenseTensor, GroupNumbers, Tensor, TwoLevel

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
CONFIG = "config.json"
_MAX_DRAFTED = 15  # a round's limit: the same layers run for every draft step
_CENTROIDS = "masked_embedding.centroids.weight"
_ORDERING = "masked_embedding.token_ordering"
_INDICES = {"I64": "<i8", "I32": "<i4"}
_LAYER = {
    role: SANDWICH_LAYER[role]
    for role in (
        *("attn_norm", "q", "q_norm", "attn_out", "post_attn_norm"),
        *("ffn_norm", "gate", "up", "down", "post_ffn_norm"),
    )
}


@dataclass(frozen=True, kw_only=True)
class GemmaAssistant:
    """A Gemma 4 assistant, read; see `HeadCheckpoint`."""

    head: HeadArch
    tensors: Mapping[str, Tensor]
    vocab_map: I32
    clusters: VocabClusters | None


def read_gemma_assistant(path: Path, arch: Arch) -> GemmaAssistant:
    """Read an assistant's folder for a target.

    Args:
        arch: the target's decoder.

    Raises:
        LoadError: the folder is damaged, or a key or tensor is not as it must be.
        MismatchError: it was made for another target; both values are named.
    """
    try:
        config = read_json(path / CONFIG)
        own = _describe(config)
        _check_target(Keys(config), own, arch)
        files = read_files(path)
        source = open_source(files, config)
        num_clusters = _num_clusters(config)
        _check_shapes(source.shapes, own, arch.hidden_size, num_clusters)
        owners = [_owner(arch, attention) for attention in own.attention]
        for owner, attention in zip(owners, own.attention, strict=True):
            _check_attention(attention, arch.attention[owner])
        with source.open() as read:
            tensors = _read_tensors(read, own, arch.hidden_size)
            scales = tuple(_read_scale(read, source.shapes, n) for n in range(own.num_layers))
            clusters = None
            if num_clusters:
                clusters = _read_clusters(files, Keys(config), own, num_clusters)
                tensors["centroids"] = _finite(read, _CENTROIDS)
    except LoadError as error:
        raise type(error)(f"{path}: {error.message}", hint=error.hint) from error
    head = HeadArch(
        num_heads=tuple(attention.num_heads for attention in own.attention),
        kv_layers=tuple(owners),
        feature_layers=(arch.num_layers,),
        norm_eps=own.norm_eps,
        max_k=_MAX_DRAFTED,
        activation=own.activation,
        embedding_scale=arch.embedding_scale,
        scales=scales,
        windows=tuple(a.window + 1 if a.window else 0 for a in own.attention),
        advances=False,
    )
    ids = np.arange(own.vocab_size, dtype=np.int32)
    return GemmaAssistant(head=head, tensors=tensors, vocab_map=ids, clusters=clusters)


def _describe(config: Mapping[str, Any]) -> Arch:
    """Return the assistant's own decoder, as if its layers owned their KV."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise LoadError(f"text_config must be an object, got {describe(text)}")
    num_layers, shared = text.get("num_hidden_layers"), text.get("num_kv_shared_layers")
    if shared not in (None, 0, num_layers):
        raise LoadError(
            f"num_kv_shared_layers must be num_hidden_layers, {num_layers}, got {shared!r}"
        )
    return GEMMA4.describe(Keys({**text, "num_kv_shared_layers": 0}))


def _check_target(keys: Keys, own: Arch, arch: Arch) -> None:
    if arch.family != "gemma4":
        raise MismatchError(
            f"the assistant was made for a gemma4 target, this one is {arch.family}"
        )
    hidden = keys.width("backbone_hidden_size")
    for name, ours, theirs in (
        ("hidden_size", hidden, arch.hidden_size),
        ("vocab_size", own.vocab_size, arch.vocab_size),
    ):
        if ours != theirs:
            raise MismatchError(
                f"the assistant was made for a target with {name} {ours}, this one has {theirs}"
            )


def _owner(arch: Arch, attention: AttentionArch) -> int:
    """Return the target's last layer of a kind that owns its KV."""
    slides = attention.window > 0
    layers = [
        index
        for index, other in enumerate(arch.attention)
        if arch.owns_kv(index) and (other.window > 0) == slides
    ]
    if not layers:
        kind = "a sliding window" if slides else "full attention"
        raise MismatchError(f"the assistant has a layer with {kind}, the target has none")
    return layers[-1]


def _check_attention(own: AttentionArch, theirs: AttentionArch) -> None:
    for field in ("num_kv_heads", "head_dim", "window", "rope_interleaved", "frequencies"):
        ours, other = getattr(own, field), getattr(theirs, field)
        if ours != other:
            raise MismatchError(
                f"the assistant's layer reads keys with {field} {_brief(ours)}, the target's have "
                f"{_brief(other)}"
            )


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]], own: Arch, hidden: int, num_clusters: int
) -> None:
    width = own.hidden_size
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (own.vocab_size, width),
        "model.norm.weight": (width,),
        "pre_projection.weight": (width, 2 * hidden),
        "post_projection.weight": (hidden, width),
    }
    if num_clusters:
        expected[_CENTROIDS] = (num_clusters, width)
    for index, attention in enumerate(own.attention):
        sizes = {
            "q": (attention.q_size, width),
            "q_norm": (attention.head_dim,),
            "attn_out": (width, attention.q_size),
            "gate": (own.ffn_size, width),
            "up": (own.ffn_size, width),
            "down": (width, own.ffn_size),
        }
        expected |= {_name(index, role): sizes.get(role, (width,)) for role in _LAYER}
    scales = {_name(index, "scale") for index in range(own.num_layers)}
    expected |= dict.fromkeys(scales & shapes.keys(), (1,))  # a file may leave them out
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            got = list(shapes[name]) if name in shapes else "nothing"
            raise LoadError(f"tensor {name} must have shape {list(shape)}, got {got}")
    rest = {"lm_head.weight", _CENTROIDS, _ORDERING}
    for name in shapes.keys() - expected.keys() - rest:
        raise LoadError(f"tensor {name} is unexpected: the draft would leave it out")


def _name(index: int, role: str) -> str:
    return f"model.layers.{index}.{SANDWICH_LAYER[role]}"


def _finite(read: TensorReader, name: str) -> Tensor:
    tensor = read(name)
    if not is_finite(tensor):
        raise LoadError(f"tensor {name} holds an infinity or NaN")
    return tensor


def _read_tensors(read: TensorReader, own: Arch, hidden: int) -> dict[str, Tensor]:
    """Read everything under a head's names; the pre-projection falls into its two halves."""
    joined = _finite(read, "pre_projection.weight")
    tensors = {
        "embed.weight": columns(joined, 0, hidden),
        "state.weight": columns(joined, hidden, 2 * hidden),
        "norm": _finite(read, "model.norm.weight"),
        "output": _finite(read, "model.embed_tokens.weight"),
        "post": _finite(read, "post_projection.weight"),
    }
    for index in range(own.num_layers):
        for role in _LAYER:
            tensors[f"layers.{index}.{role}"] = _finite(read, _name(index, role))
    return tensors


def _read_scale(read: TensorReader, shapes: Mapping[str, tuple[int, ...]], index: int) -> float:
    name = _name(index, "scale")
    return float(_finite(read, name).dequantize()[0]) if name in shapes else 1.0


def _num_clusters(config: Mapping[str, Any]) -> int:
    """Return how many clusters the vocabulary has, 0 where all of it is looked into."""
    keys = Keys(config)
    if not keys.flag("use_ordered_embeddings", False):
        return 0
    return keys.integer("num_centroids", 1, MAX_WIDTH, 2048)


def _read_clusters(files: SafetensorsFiles, keys: Keys, own: Arch, count: int) -> VocabClusters:
    """Read how the vocabulary is clustered: `_ORDERING` lists its ids cluster after cluster."""
    top = keys.integer("centroid_intermediate_top_k", 1, count, min(32, count))
    entry = files.entries.get(_ORDERING)
    if entry is None or entry.dtype not in _INDICES or entry.shape != (own.vocab_size,):
        raise LoadError(f"tensor {_ORDERING} must be int64 or int32 of shape [{own.vocab_size}]")
    with files.open() as maps:
        ordering = maps.raw(_ORDERING, _INDICES[entry.dtype]).astype(np.int64)
    if own.vocab_size % count or not (np.sort(ordering) == np.arange(own.vocab_size)).all():
        raise LoadError(f"tensor {_ORDERING} must hold each token once, in {count} equal clusters")
    members = np.empty(own.vocab_size, np.int32)
    members[ordering] = np.arange(own.vocab_size) // (own.vocab_size // count)
    return VocabClusters(members=members, top=top)


def columns(tensor: Tensor, first: int, last: int) -> Tensor:
    """Return the columns [first, last) of a matrix.

    Raises:
        LoadError: they do not begin and end with a quantized matrix' groups.
    """
    if isinstance(tensor, DenseTensor):
        return dataclasses.replace(tensor, values=tensor.values[:, first:last])
    group = tensor.group
    if first % group or last % group:
        raise LoadError(f"a matrix in groups of {group} cannot be parted at column {first or last}")
    part = slice(first // group, last // group)
    return dataclasses.replace(
        tensor,
        codes=tensor.codes[:, first:last],
        scale=_of_groups(tensor.scale, part),
        bias=None if tensor.bias is None else _of_groups(tensor.bias, part),
    )


def _of_groups(numbers: GroupNumbers, part: slice) -> GroupNumbers:
    if isinstance(numbers, TwoLevel):
        raise LoadError("a matrix with scales of two levels cannot be parted by columns")
    if isinstance(numbers, BFloat16):
        return BFloat16(bits=numbers.bits[:, part])
    return numbers[:, part]
