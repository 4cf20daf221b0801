"""A checkpoint's tensors to a back end's decoder weights, one fused matrix after the other.

The canonical form of a matrix lives only until the back end has repacked it. A back end that takes
matrices in pieces gets them so, and the peak is little more than the repacked model; with another
it is that and the largest matrix's codes. q, k, v share one weight, and so do gate and up; a tied
output is the embedding's own weight, repacked once.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np

from slipstream.errors import LoadError
from slipstream.kernels.ops import Backend, TakesPieces, Weight
from slipstream.models.decoder import DecoderWeights, LayerWeights
from slipstream.models.loading.checkpoint import (
    EMBEDDING,
    NORM,
    OUTPUT,
    Checkpoint,
    TensorReader,
    layer_role,
    tensor_shapes,
)
from slipstream.models.loading.finite import is_finite
from slipstream.models.weights import DenseTensor, Tensor, TensorInPieces


def load_decoder(checkpoint: Checkpoint, backend: Backend) -> DecoderWeights:
    """Read every tensor of a checkpoint and repack it.

    Raises:
        LoadError: the file changed or cannot be read, or a tensor holds an infinity or NaN.
    """
    arch = checkpoint.arch
    with checkpoint.open() as read:
        packer = _Packer(checkpoint, read, backend)
        embedding = packer.matrix(EMBEDDING)
        layers = tuple(_load_layer(packer, index) for index in range(arch.num_layers))
        norm = packer.vector(NORM)
        output = embedding if arch.tied_embedding else packer.matrix(OUTPUT)
    return DecoderWeights(embedding=embedding, layers=layers, norm=norm, output=output)


class _Packer:
    """Reads tensors by role and hands them to the back end; a role the decoder lacks is None."""

    def __init__(self, checkpoint: Checkpoint, read: TensorReader, backend: Backend) -> None:
        self._roles = tensor_shapes(checkpoint.arch)
        self._names, self._read, self._backend = checkpoint.names, read, backend

    def matrix(self, *roles: str) -> Weight:
        present = [role for role in roles if role in self._roles]
        if not self._backend.takes_pieces:
            return self._backend.matrix([self._tensor(role) for role in present])
        return cast("TakesPieces", self._backend).matrix([self._in_pieces(r) for r in present])

    def vector(self, *roles: str) -> Weight | None:
        present = [role for role in roles if role in self._roles]
        if len(present) < 2:
            return self._backend.vector(self._tensor(present[0])) if present else None
        joined = np.concatenate([self._tensor(role).dequantize() for role in present])
        return self._backend.vector(DenseTensor(values=joined, dtype="f32"))

    def number(self, role: str, *, default: float) -> float:
        return float(self._tensor(role).dequantize()[0]) if role in self._roles else default

    def _tensor(self, role: str) -> Tensor:
        return self._checked(role, self._read(role))

    def _in_pieces(self, role: str) -> TensorInPieces:
        n, k = self._roles[role]
        return TensorInPieces(shape=(n, k), read=partial(self._rows, role))

    def _rows(self, role: str, low: int, high: int) -> Tensor:
        return self._checked(role, self._read.rows(role, low, high))

    def _checked(self, role: str, tensor: Tensor) -> Tensor:
        if not is_finite(tensor):
            raise LoadError(
                f"tensor {self._names[role]} holds an infinity or NaN", hint="fetch the file again"
            )
        return tensor


def _load_layer(packer: _Packer, index: int) -> LayerWeights:
    def roles(*names: str) -> list[str]:
        return [layer_role(index, name) for name in names]

    return LayerWeights(
        attn_norm=packer.vector(*roles("attn_norm")),
        qkv=packer.matrix(*roles("q", "k", "v")),
        attn_out=packer.matrix(*roles("attn_out")),
        ffn_norm=packer.vector(*roles("ffn_norm")),
        gate_up=packer.matrix(*roles("gate", "up")),
        down=packer.matrix(*roles("down")),
        qkv_bias=packer.vector(*roles("q_bias", "k_bias", "v_bias")),
        q_norm=packer.vector(*roles("q_norm")),
        k_norm=packer.vector(*roles("k_norm")),
        post_attn_norm=packer.vector(*roles("post_attn_norm")),
        post_ffn_norm=packer.vector(*roles("post_ffn_norm")),
        scale=packer.number(*roles("scale"), default=1.0),
    )
