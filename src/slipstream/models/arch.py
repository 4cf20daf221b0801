"""Frozen description of a decoder: everything that the one forward needs to know of a family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Arch:
    """Shape and constants of a decoder-only transformer.

    Attributes:
        family: name in the file, e.g. "llama".
        num_layers: decoder layers.
        hidden_size: width H of the residual stream.
        ffn_size: width of the gated MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        head_dim: width of a head.
        vocab_size: V.
        context_len: positions that the model was trained for.
        norm_eps: RMS norm epsilon.
        rope_theta: RoPE base frequency.
        rope_interleaved: True rotates pairs (2i, 2i+1), False pairs (i, i + head_dim/2).
        tied_embedding: the output matrix is the embedding.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_len: int
    norm_eps: float
    rope_theta: float
    rope_interleaved: bool
    tied_embedding: bool
