"""GGUF metadata and tensor directory to `Arch`, refusing what the forward would compute wrongly.

A model that loads and then babbles is worse than one that does not load. So every key of the family
that changes the arithmetic is looked at, every tensor must be expected, present and of the shape
that the metadata imply, and every refusal names both values.

Key names: the "LLM" section of the GGUF specification. GGUF files of the llama family store q and k
with rows permuted for interleaved pairs, hence `rope_interleaved`.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.errors import LoadError
from slipstream.models.arch import Arch, AttentionArch, plain_frequencies, score_scale
from slipstream.models.loading.gguf import GgufFile, TensorInfo
from slipstream.models.loading.metadata import (
    Metadata,
    describe,
    read_float,
    read_int,
    read_str,
)

FAMILIES = ("llama",)
EMBEDDING, OUTPUT, NORM = "token_embd.weight", "output.weight", "output_norm.weight"

# Bounds that no model reaches, so that a damaged count is named and never multiplied out.
_MAX_LAYERS, _MAX_WIDTH, _MAX_CONTEXT = 1 << 12, 1 << 20, 1 << 30
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION: the block layouts that formats.py reads

# Keys that change the arithmetic, with the values at which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "rope.scaling.type": ("none", ""),
    "rope.scaling.factor": (0, 1),
    "rope.scale_linear": (0, 1),
    "attention.sliding_window": (0,),
    "attention.scale": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "use_parallel_residual": (False,),
    "expert_count": (0,),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
}


def read_arch(file: GgufFile) -> Arch:
    """Describe the decoder in a GGUF file.

    Raises:
        LoadError: another architecture, a feature that the forward does not compute, a missing or
            unexpected tensor, or two values that contradict each other.
    """
    metadata, tensors = file.metadata, file.tensors
    family = read_str(metadata, "general.architecture")
    if family not in FAMILIES:
        raise LoadError(
            f"architecture must be one of {', '.join(FAMILIES)}, got {describe(family)}"
        )
    _refuse_unsupported(metadata, tensors, family)
    embedding = tensors.get(EMBEDDING)
    if embedding is None:
        raise LoadError(f"tensor {EMBEDDING} is missing")
    hidden = read_int(metadata, f"{family}.embedding_length", 1, _MAX_WIDTH)
    attention = _attention(metadata, family, hidden)
    num_layers = read_int(metadata, f"{family}.block_count", 1, _MAX_LAYERS)
    arch = Arch(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_size=read_int(metadata, f"{family}.feed_forward_length", 1, _MAX_WIDTH),
        vocab_size=embedding.shape[0],
        context_len=read_int(metadata, f"{family}.context_length", 1, _MAX_CONTEXT),
        norm_eps=read_float(metadata, f"{family}.attention.layer_norm_rms_epsilon"),
        tied_embedding=OUTPUT not in tensors,
        attention=(attention,) * num_layers,
        kv_layers=tuple(range(num_layers)),
    )
    stated = read_int(metadata, f"{family}.vocab_size", 1, 1 << 31, arch.vocab_size)
    if stated != arch.vocab_size:
        raise LoadError(f"{family}.vocab_size is {stated}, but {EMBEDDING} has {arch.vocab_size}")
    _check_tensors(tensors, expected_shapes(arch))
    return arch


def expected_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that the forward needs."""
    hidden, ffn = arch.hidden_size, arch.ffn_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (arch.vocab_size, hidden), NORM: (hidden,)}
    if not arch.tied_embedding:
        shapes[OUTPUT] = (arch.vocab_size, hidden)
    for index, attention in enumerate(arch.attention):
        q_size, kv_size = attention.q_size, attention.kv_size
        layer = {
            "attn_norm": (hidden,),
            "attn_q": (q_size, hidden),
            "attn_k": (kv_size, hidden),
            "attn_v": (kv_size, hidden),
            "attn_output": (hidden, q_size),
            "ffn_norm": (hidden,),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
        }
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _attention(metadata: Metadata, family: str, hidden: int) -> AttentionArch:
    """Return the attention that every layer has."""
    heads = read_int(metadata, f"{family}.attention.head_count", 1, _MAX_WIDTH)
    kv_heads = read_int(metadata, f"{family}.attention.head_count_kv", 1, heads, heads)
    head_dim = _head_dim(metadata, family, hidden, heads)
    theta = read_float(metadata, f"{family}.rope.freq_base", 10000.0)
    if heads % kv_heads:
        raise LoadError(
            f"head_count must be a multiple of head_count_kv, got {heads} and {kv_heads}"
        )
    return AttentionArch(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        frequencies=plain_frequencies(head_dim, theta),
        rope_interleaved=True,
        scale=score_scale(head_dim),
    )


def _head_dim(metadata: Metadata, family: str, hidden: int, heads: int) -> int:
    """Return the width of a head; q, k, v and the rotated part must agree on it."""
    key_len = f"{family}.attention.key_length"
    if key_len not in metadata and hidden % heads:
        raise LoadError(
            f"embedding_length must be a multiple of head_count, got {hidden} and {heads}"
        )
    head_dim = read_int(metadata, key_len, 2, _MAX_WIDTH, hidden // heads)
    if head_dim < 2 or head_dim % 2:
        raise LoadError(f"the width of a head must be even and above 0, got {head_dim}")
    for key in (f"{family}.attention.value_length", f"{family}.rope.dimension_count"):
        value = read_int(metadata, key, 0, _MAX_WIDTH, head_dim)
        if value != head_dim:
            raise LoadError(f"{key} must equal the width of a head, {head_dim}, got {value}")
    return head_dim


def _refuse_unsupported(metadata: Metadata, tensors: Mapping[str, TensorInfo], family: str) -> None:
    for key, neutral in _NEUTRAL.items():
        value = metadata.get(f"{family}.{key}")
        if value is not None and not any(value is item or value == item for item in neutral):
            raise LoadError(
                f"{family}.{key} is not supported: it must be absent or "
                f"{' or '.join(repr(item) for item in neutral)}, got {describe(value)}"
            )
    if read_int(metadata, "split.count", 0, 1 << 16, 1) > 1:
        raise LoadError("the model is split into several files", hint="merge the parts first")
    if any(item.format.is_quantized for item in tensors.values()):
        version = read_int(
            metadata, "general.quantization_version", 0, 1 << 32, _QUANTIZATION_VERSION
        )
        if version != _QUANTIZATION_VERSION:
            raise LoadError(
                f"general.quantization_version must be {_QUANTIZATION_VERSION}, got {version}"
            )
    for name in tensors:
        if name.startswith("rope_freqs."):
            raise LoadError(f"tensor {name}: RoPE frequency factors are not supported")
        if name.endswith(".bias"):
            raise LoadError(f"tensor {name}: biases are not supported")


def _check_tensors(
    tensors: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]
) -> None:
    for name, shape in expected.items():
        info = tensors.get(name)
        if info is None:
            raise LoadError(f"tensor {name} of shape {list(shape)} is missing")
        if info.shape != shape:
            raise LoadError(f"tensor {name} must have shape {list(shape)}, got {list(info.shape)}")
        if len(shape) == 1 and info.format.is_quantized:
            raise LoadError(f"tensor {name} must be F32, F16 or BF16, got {info.format.name}")
    for name in tensors:
        if name not in expected:
            raise LoadError(
                f"tensor {name} is unexpected: the forward would leave it out",
                hint="the file holds a variant of the family that is not supported",
            )
