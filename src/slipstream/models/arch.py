"""Frozen description of a decoder: everything that the one forward needs to know of a family.

Plain data. Attention is described layer by layer, for families mix several kinds; layers that are
alike share one object. What a loader can fold into numbers it folds: RoPE scaling into the
frequencies, norm weights that mean 1 + w into the weights. A back end names what it runs and
refuses the rest by `Arch.require`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from slipstream.errors import LoadError

SLOWER = "--device reference runs every family, slowly"  # hint of fast back ends

# What a decoder may have beyond a plain llama, as messages name it.
ROPE_MAGNITUDE = "a magnitude of the rotation"
SCORE_SCALE = "a scale of scores other than 1/sqrt(head size)"
WINDOW = "sliding-window attention"
SCORE_SOFTCAP = "a soft-cap of attention scores"
QK_NORM = "norms of q and k"
V_NORM = "a norm of v"
K_IS_V = "keys that are also values"
QKV_BIAS = "biases of q, k and v"
MIXED_ATTENTION = "layers of different attention"
SHARED_KV = "layers that share KV"
GELU = "the activation gelu_tanh"
EMBEDDING_SCALE = "scaled embeddings"
POST_NORMS = "norms after attention and MLP"
LOGIT_SOFTCAP = "a soft-cap of logits"

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class AttentionArch:
    """The attention of one layer; the group of equal layers shares one object.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        head_dim: width D of a head.
        frequencies: of shape (D / 2,); pair i turns by position * frequencies[i], 0 leaves a pair
            as it is. Scaling for long contexts is in them already.
        rope_interleaved: True rotates pairs (2i, 2i+1), False pairs (i, i + D/2).
        rope_magnitude: multiplies cosine and sine.
        scale: multiplies q . k.
        window: a row sees this many positions, its own included; 0 sees all.
        softcap: scores become softcap * tanh(scores / softcap); 0 for none.
        qk_norm: each head of q and k has an RMS norm with a weight (D,), before rotation.
        v_norm: each head of v has an RMS norm without a weight.
        k_is_v: there is no v projection; v is k before norm and rotation.
        qkv_bias: q, k and v have biases.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    frequencies: tuple[float, ...]
    rope_interleaved: bool
    rope_magnitude: float = 1.0
    scale: float
    window: int = 0
    softcap: float = 0.0
    qk_norm: bool = False
    v_norm: bool = False
    k_is_v: bool = False
    qkv_bias: bool = False

    @property
    def q_size(self) -> int:
        """Columns of q."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of k, and of v."""
        return self.num_kv_heads * self.head_dim

    @property
    def features(self) -> frozenset[str]:
        """What it has beyond plain attention."""
        return _present(
            {
                ROPE_MAGNITUDE: self.rope_magnitude != 1,
                SCORE_SCALE: self.scale != score_scale(self.head_dim),
                WINDOW: self.window > 0,
                SCORE_SOFTCAP: self.softcap > 0,
                QK_NORM: self.qk_norm,
                V_NORM: self.v_norm,
                K_IS_V: self.k_is_v,
                QKV_BIAS: self.qkv_bias,
            }
        )


@dataclass(frozen=True, kw_only=True)
class Arch:
    """Shape and constants of a decoder-only transformer.

    Attributes:
        family: name in the file, e.g. "llama".
        num_layers: decoder layers.
        hidden_size: width H of the residual stream.
        ffn_size: width of the gated MLP.
        vocab_size: V.
        context_len: positions that the model was trained for.
        norm_eps: RMS norm epsilon.
        tied_embedding: the output matrix is the embedding.
        attention: one for each layer.
        kv_layers: the layer whose KV each layer attends to, its own index unless shared.
        activation: of the MLP's gate.
        embedding_scale: multiplies the embedding rows.
        post_norms: a norm after attention and one after the MLP, before the residual is added.
        layer_scales: the checkpoint scales the residual stream at each layer's end.
        logit_softcap: logits become logit_softcap * tanh(logits / logit_softcap); 0 for none.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    context_len: int
    norm_eps: float
    tied_embedding: bool
    attention: tuple[AttentionArch, ...]
    kv_layers: tuple[int, ...]
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    post_norms: bool = False
    layer_scales: bool = False
    logit_softcap: float = 0.0

    def owns_kv(self, layer: int) -> bool:
        """Return whether a layer has keys and values of its own."""
        return self.kv_layers[layer] == layer

    @property
    def kv_width(self) -> int:
        """Numbers that K and V of one position take, over all layers that own theirs."""
        owners = (index for index in range(self.num_layers) if self.owns_kv(index))
        return sum(2 * self.attention[index].kv_size for index in owners)

    @property
    def uniform(self) -> AttentionArch:
        """The attention that every layer has.

        Raises:
            LoadError: layers differ.
        """
        first = self.attention[0]
        if any(other != first for other in self.attention):
            raise LoadError(f"{self.family}: {MIXED_ATTENTION} are not supported here")
        return first

    @property
    def features(self) -> frozenset[str]:
        """What it has beyond a plain llama."""
        own = _present(
            {
                MIXED_ATTENTION: any(other != self.attention[0] for other in self.attention),
                SHARED_KV: not all(map(self.owns_kv, range(self.num_layers))),
                GELU: self.activation == "gelu_tanh",
                EMBEDDING_SCALE: self.embedding_scale != 1,
                POST_NORMS: self.post_norms,
                LOGIT_SOFTCAP: self.logit_softcap > 0,
            }
        )
        return own.union(*(attention.features for attention in set(self.attention)))

    def require(self, supported: Collection[str], who: str, hint: str | None = None) -> None:
        """Refuse what `who`, e.g. "the cpu back end", does not run.

        Raises:
            LoadError: a feature that is not among the supported ones; all such are named.
        """
        if missing := self.features.difference(supported):
            raise unsupported(self.family, missing, who, hint)


def unsupported(
    family: str, features: Collection[str], who: str, hint: str | None = None
) -> LoadError:
    """Return the refusal of features that `who` does not run."""
    return LoadError(
        f"{who} does not run {', '.join(sorted(features))}, which {family} has", hint=hint
    )


def score_scale(head_dim: int) -> float:
    """Return 1 / sqrt(head_dim), the scale of scores unless a family says otherwise."""
    return 1 / math.sqrt(head_dim)


def plain_frequencies(head_dim: int, theta: float) -> tuple[float, ...]:
    """Return theta ** (-2 i / head_dim) for each pair i of a head, head_dim even.

    (Su et al. 2021, RoFormer, section 3.2.2.)
    """
    import numpy as np  # here: the command line knows recipes, which know this, before it needs it

    pairs = np.arange(head_dim // 2, dtype=np.float64)
    return tuple(np.power(np.float64(theta), -2.0 * pairs / head_dim).tolist())


def _present(features: dict[str, bool]) -> frozenset[str]:
    return frozenset(name for name, present in features.items() if present)
