"""What a checkpoint of any format looks like to the loader: a decoder and its tensors by role.

A format is a `Source`: tensors by the file's own names, read one at a time. A family says which of
those names is which role. `bind` joins the two into a `Checkpoint`, and refuses tensors that are
missing, misshapen or unexpected; `load_decoder` is written once against it.

Roles are "embedding", "norm", "output" and, in layer i, "layers.i.ROLE" with the names of
`tensor_shapes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slipstream.errors import LoadError
from slipstream.models.arch import Arch
from slipstream.models.loading.finite import is_finite
from slipstream.models.loading.quantize import quantized
from slipstream.models.weights import DenseTensor, Tensor

EMBEDDING, NORM, OUTPUT = "embedding", "norm", "output"
_NORMS = ("norm", "attn_norm", "ffn_norm", "post_attn_norm", "post_ffn_norm", "q_norm", "k_norm")


class TensorReader(Protocol):
    """Reads tensors by name; what it returns is to be let go before the next but one is read.

    Raises LoadError where one cannot be read or the file changed since it was opened. A reader from
    a memory map also has `forget`, which gives back the pages of what it handed out.
    """

    def __call__(self, name: str, /) -> Tensor:
        """Return a whole tensor."""

    def rows(self, name: str, low: int, high: int, /) -> Tensor:
        """Return the outputs [low, high) of a matrix, to be let go before anything else is read."""


class Source(Protocol):
    """A file's or folder's tensors, by the names in it."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each tensor; a quantized matrix is one tensor, (outputs, inputs)."""

    def open(self) -> AbstractContextManager[TensorReader]:
        """Open the tensors for reading."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A decoder and its tensors, which are all there.

    Attributes:
        arch: the decoder.
        source: where the tensors are.
        names: each role's name in the source.
        norm_shift: what is added to norm weights: 1 where w is stored for 1 + w.
        quantize: what dense matrices are rounded to: "none", "q4" or "q8".
    """

    arch: Arch
    source: Source
    names: Mapping[str, str]
    norm_shift: float = 0.0
    quantize: str = "none"

    @contextmanager
    def open(self) -> Iterator[TensorReader]:
        """Open the tensors for reading by role.

        A reader raises LoadError where a tensor's values are beyond what they are rounded to.
        """
        with self.source.open() as read:
            yield _RoleReader(self, read)


class _RoleReader:
    """Reads tensors by role, as the decoder takes them."""

    def __init__(self, checkpoint: Checkpoint, read: TensorReader) -> None:
        self._checkpoint, self._read = checkpoint, read

    def __call__(self, role: str) -> Tensor:
        return self._made(role, self._read(self._checkpoint.names[role]))

    def rows(self, role: str, low: int, high: int) -> Tensor:
        return self._made(role, self._read.rows(self._checkpoint.names[role], low, high))

    def _made(self, role: str, tensor: Tensor) -> Tensor:
        checkpoint = self._checkpoint
        if checkpoint.norm_shift and role.rpartition(".")[2] in _NORMS:
            values = tensor.dequantize() + np.float32(checkpoint.norm_shift)
            return DenseTensor(values=values, dtype="f32")
        made = quantized(
            tensor,
            checkpoint.quantize,
            is_table=role in (EMBEDDING, OUTPUT),
            forget=getattr(self._read, "forget", None),
        )
        if made is not tensor and not is_finite(made) and is_finite(tensor):
            raise LoadError(
                f"tensor {checkpoint.names[role]} has values that {checkpoint.quantize} cannot "
                "hold: its scales are float16, up to 65504",
                hint="load it without quantize",
            )
        return made


def bind(
    arch: Arch,
    source: Source,
    names: Mapping[str, str],
    *,
    norm_shift: float = 0.0,
    unused: Collection[str] = (),
) -> Checkpoint:
    """Check a source against what its decoder needs.

    Args:
        names: each role's name in the source; it may name roles that the decoder does not have.
        unused: names in the source that may be there and are not read.

    Raises:
        LoadError: a tensor is missing, misshapen or unexpected; it is named.
    """
    expected = {role: names[role] for role in tensor_shapes(arch)}
    for role, shape in tensor_shapes(arch).items():
        name = expected[role]
        got = source.shapes.get(name)
        if got is None:
            raise LoadError(f"tensor {name} of shape {list(shape)} is missing")
        if got != shape:
            raise LoadError(f"tensor {name} must have shape {list(shape)}, got {list(got)}")
    known = {*expected.values(), *unused}
    for name in source.shapes:
        if name not in known:
            raise LoadError(
                f"tensor {name} is unexpected: the forward would leave it out",
                hint="the file holds a variant of the family that is not supported",
            )
    return Checkpoint(arch=arch, source=source, names=expected, norm_shift=norm_shift)


def layer_role(index: int, role: str) -> str:
    """Return the name of one layer's role, e.g. "layers.3.q"."""
    return f"layers.{index}.{role}"


def tensor_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Return the role and shape of every tensor that the forward needs."""
    hidden = arch.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (arch.vocab_size, hidden), NORM: (hidden,)}
    if not arch.tied_embedding:
        shapes[OUTPUT] = (arch.vocab_size, hidden)
    for index in range(arch.num_layers):
        layer = _layer_shapes(arch, index)
        shapes |= {layer_role(index, role): shape for role, shape in layer.items()}
    return shapes


def _layer_shapes(arch: Arch, index: int) -> dict[str, tuple[int, ...]]:
    hidden, ffn, attention = arch.hidden_size, arch.ffn_size, arch.attention[index]
    outputs = {"q": attention.q_size}
    if arch.owns_kv(index):
        outputs["k"] = attention.kv_size
        if not attention.k_is_v:
            outputs["v"] = attention.kv_size
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,)}
    shapes |= {role: (size, hidden) for role, size in outputs.items()}
    if attention.qkv_bias:
        shapes |= {f"{role}_bias": (size,) for role, size in outputs.items()}
    if attention.qk_norm:
        shapes |= {f"{role}_norm": (attention.head_dim,) for role in outputs if role != "v"}
    shapes |= {"attn_out": (hidden, attention.q_size), "ffn_norm": (hidden,)}
    shapes |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    if arch.post_norms:
        shapes |= {"post_attn_norm": (hidden,), "post_ffn_norm": (hidden,)}
    if arch.layer_scales:
        shapes["scale"] = (1,)
    return shapes
