"""What a checkpoint of any format looks like to the loader: a decoder and its tensors by role.

A format is a reader plus a map from the names here to its own; `load_decoder` is written once
against this. Names are "embedding", "norm", "output" and, in layer i, "layers.i.ROLE" with the
roles of `tensor_shapes`. Tensors come one at a time, already in the form that `Arch` means: norms
that are stored as w for 1 + w have the 1 added, q and k of one layer have rows in the order that
`rope_interleaved` says.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from slipstream.models.arch import Arch
from slipstream.models.weights import Tensor

EMBEDDING, NORM, OUTPUT = "embedding", "norm", "output"


class TensorReader(Protocol):
    """An opened checkpoint's tensors."""

    def __call__(self, name: str) -> Tensor:
        """Read one tensor; it may be let go before the next.

        Args:
            name: one of `tensor_shapes`.

        Raises:
            LoadError: it cannot be read, or the file changed since it was opened.
        """


class Checkpoint(Protocol):
    """A validated checkpoint: every tensor of `tensor_shapes(arch)` is there, in that shape."""

    @property
    def arch(self) -> Arch:
        """The decoder."""

    def open(self) -> AbstractContextManager[TensorReader]:
        """Open the tensors for reading."""


def layer_name(index: int, role: str) -> str:
    """Return the name of one layer's tensor, e.g. "layers.3.q"."""
    return f"layers.{index}.{role}"


def tensor_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that the forward needs."""
    hidden = arch.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (arch.vocab_size, hidden), NORM: (hidden,)}
    if not arch.tied_embedding:
        shapes[OUTPUT] = (arch.vocab_size, hidden)
    for index in range(arch.num_layers):
        layer = _layer_shapes(arch, index)
        shapes |= {layer_name(index, role): shape for role, shape in layer.items()}
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
    return shapes
