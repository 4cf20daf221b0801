"""GGUF header and tensor directory to a checkpoint, refusing what would be computed wrongly.

Every key of the family that changes the arithmetic is looked at, every tensor must be expected,
present and of the shape that the metadata imply, and every refusal names both values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader

from slipstream.errors import LoadError
from slipstream.models.arch import Arch
from slipstream.models.loading.checkpoint import (
    EMBEDDING,
    NORM,
    OUTPUT,
    Checkpoint,
    TensorReader,
    bind,
    layer_role,
    tensor_shapes,
)
from slipstream.models.loading.families import FAMILIES
from slipstream.models.loading.families.gguf_arch import BLOCK, ROPE_FACTORS
from slipstream.models.loading.families.gguf_arch import OUTPUT as OUTPUT_TENSOR
from slipstream.models.loading.gguf import GgufFile
from slipstream.models.loading.keys import Keys
from slipstream.models.loading.metadata import describe, read_int, read_str
from slipstream.models.weights import F32, Tensor

ARCHITECTURES = {family.gguf: family for family in FAMILIES if family.gguf is not None}
_EMBEDDING = "token_embd.weight"
_TOP = {EMBEDDING: _EMBEDDING, NORM: "output_norm.weight", OUTPUT: OUTPUT_TENSOR}
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION: the block layouts that formats.py reads

# Keys that change the arithmetic, with the values at which they do not. A family that reads one
# answers for it itself.
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


class GgufSource:
    """A GGUF file as a `Source`."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: info.shape for name, info in file.tensors.items()
        }

    @contextmanager
    def open(self) -> Iterator[TensorReader]:
        """Open the file for reading."""
        with self._file.open() as source:
            yield _GgufReader(self._file, source)


class _GgufReader:
    """A `TensorReader` of an open file."""

    def __init__(self, file: GgufFile, source: BufferedReader) -> None:
        self._file, self._source = file, source

    def __call__(self, name: str) -> Tensor:
        return self._file.read_tensor(self._source, name)

    def rows(self, name: str, low: int, high: int) -> Tensor:
        return self._file.read_rows(self._source, name, low, high)


class _Header:
    """The `GgufHeader` of a file."""

    def __init__(self, file: GgufFile, family: str) -> None:
        self._file = file
        self.keys = Keys(file.metadata, f"{family}.")
        if _EMBEDDING not in file.tensors:
            raise LoadError(f"tensor {_EMBEDDING} is missing")
        self.vocab_size = file.tensors[_EMBEDDING].shape[0]

    def has(self, tensor: str) -> bool:
        return tensor in self._file.tensors

    def numbers(self, tensor: str) -> F32:
        with GgufSource(self._file).open() as read:
            return read(tensor).dequantize()


def read_checkpoint(file: GgufFile) -> Checkpoint:
    """Describe the decoder in a GGUF file and check its tensors.

    Raises:
        LoadError: another architecture, a feature that the forward does not compute, a missing or
            unexpected tensor, or two values that contradict each other.
    """
    name = read_str(file.metadata, "general.architecture")
    family = ARCHITECTURES.get(name)
    if family is None or family.describe_gguf is None:
        raise LoadError(
            f"architecture must be one of {', '.join(sorted(ARCHITECTURES))}, got {describe(name)}"
        )
    _check_file(file)
    header = _Header(file, name)
    arch = family.describe_gguf(header)
    for key in set(_NEUTRAL).intersection(header.keys.unread()):
        header.keys.must(key, *_NEUTRAL[key])
    stated = header.keys.integer("vocab_size", 1, 1 << 31, arch.vocab_size)
    if stated != arch.vocab_size:
        raise LoadError(f"{name}.vocab_size is {stated}, but {_EMBEDDING} has {arch.vocab_size}")
    _check_vectors(file, arch)
    return bind(arch, GgufSource(file), _names(arch), unused=_unused(arch))


def _names(arch: Arch) -> dict[str, str]:
    names = dict(_TOP)
    for index in range(arch.num_layers):
        names |= {layer_role(index, role): f"blk.{index}.{name}" for role, name in BLOCK.items()}
    return names


def _unused(arch: Arch) -> list[str]:
    """Return tensors that are read with the header, or that a layer with another's KV ignores."""
    shared = [index for index in range(arch.num_layers) if not arch.owns_kv(index)]
    of_kv = [f"blk.{index}.{BLOCK[role]}" for index in shared for role in ("k", "v", "k_norm")]
    return [ROPE_FACTORS, *of_kv]


def _check_file(file: GgufFile) -> None:
    metadata = file.metadata
    if read_int(metadata, "split.count", 0, 1 << 16, 1) > 1:
        raise LoadError("the model is split into several files", hint="merge the parts first")
    if any(item.format.is_quantized for item in file.tensors.values()):
        version = read_int(
            metadata, "general.quantization_version", 0, 1 << 32, _QUANTIZATION_VERSION
        )
        if version != _QUANTIZATION_VERSION:
            raise LoadError(
                f"general.quantization_version must be {_QUANTIZATION_VERSION}, got {version}"
            )


def _check_vectors(file: GgufFile, arch: Arch) -> None:
    names = _names(arch)
    for role, shape in tensor_shapes(arch).items():
        info = file.tensors.get(names[role])
        if info is not None and len(shape) == 1 and info.format.is_quantized:
            raise LoadError(f"tensor {info.name} must be F32, F16 or BF16, got {info.format.name}")
