"""Frozen description of an assistant's head: everything that the one draft needs to know of it.

Plain data, as `Arch` is of a target. A checkpoint of any format becomes a `HeadArch`, tensors by
name, and the target ids of what it can draft. The names: "features.i.norm", "features.i.weight",
"embed.norm", "embed.weight", "state.norm", "state.weight", in layer n "layers.n.ROLE" with the
roles attn_norm, q, q_norm, attn_out, post_attn_norm, ffn_norm, gate, up, down, post_ffn_norm, then
"norm", "output", "post" and "centroids". What a head does not have has no name: a norm that is not
there is left out, and without "features.i.norm" a feature has the target's own final norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slipstream.models.arch import Activation
from slipstream.models.weights import Tensor

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class HeadArch:
    """Shape and constants of a head.

    Attributes:
        num_heads: query heads of each layer.
        kv_layers: the target layer, from 0, whose KV each of its layers attends to.
        feature_layers: after how many of the target's layers each feature is taken, 1 to L.
        norm_eps: RMS norm epsilon.
        max_k: the most tokens that it may be asked to draft in a round.
        activation: of the MLP's gate.
        embedding_scale: multiplies the target's embedding rows.
        scales: multiply the residual stream at each layer's end.
        windows: how many positions before the anchor each layer attends to, 0 for all.
        advances: True rotates queries of draft step j by the anchor's position + j, False those of
            every step by the anchor's position.
    """

    num_heads: tuple[int, ...]
    kv_layers: tuple[int, ...]
    feature_layers: tuple[int, ...]
    norm_eps: float
    max_k: int
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    scales: tuple[float, ...]
    windows: tuple[int, ...]
    advances: bool = True


@dataclass(frozen=True, kw_only=True)
class VocabClusters:
    """A vocabulary in clusters, of which a draft step looks into the best few.

    Attributes:
        members: int32 of shape (W,), the cluster of each draft token.
        top: how many clusters are looked into; "centroids" of shape (clusters, D) choose them.
    """

    members: I32
    top: int


class HeadCheckpoint(Protocol):
    """A head's checkpoint, read and validated against its target."""

    @property
    def head(self) -> HeadArch:
        """Its description."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Norm weights and matrices by name."""

    @property
    def vocab_map(self) -> I32:
        """The ascending target ids, of shape (W,), of the draft vocabulary."""

    @property
    def clusters(self) -> VocabClusters | None:
        """How the draft vocabulary is clustered, None where it is not."""
