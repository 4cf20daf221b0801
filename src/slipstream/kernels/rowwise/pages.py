"""KV pages of the reference, as torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor as TorchTensor

from slipstream.kernels.ops import F32, PAGE_SIZE
from slipstream.kernels.rope import rope_tables
from slipstream.models.arch import Arch, AttentionArch


@dataclass(frozen=True, kw_only=True)
class KVPages:
    """What a layer attends to, (num_pages, 16, kv_heads, D), and how; tables are its own."""

    attention: AttentionArch
    k: TorchTensor
    v: TorchTensor
    cos: TorchTensor
    sin: TorchTensor


class ReferenceKVCache:
    """KV pages of every layer that owns its keys and values."""

    def __init__(self, arch: Arch, num_pages: int, max_len: int, dtype: torch.dtype) -> None:
        self.num_pages = num_pages
        owned: dict[int, tuple[TorchTensor, TorchTensor]] = {}
        tables: dict[AttentionArch, tuple[TorchTensor, TorchTensor]] = {}
        self._layers = []
        for attention, owner in zip(arch.attention, arch.kv_layers, strict=True):
            if owner not in owned:
                shape = (num_pages, PAGE_SIZE, attention.num_kv_heads, attention.head_dim)
                owned[owner] = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
            if attention not in tables:
                angles = rope_tables(attention.frequencies, max_len, attention.rope_magnitude)
                tables[attention] = torch.from_numpy(angles[0]), torch.from_numpy(angles[1])
            (k, v), (cos, sin) = owned[owner], tables[attention]
            self._layers.append(KVPages(attention=attention, k=k, v=v, cos=cos, sin=sin))
        self._owned = list(owned.values())

    def layer(self, index: int) -> KVPages:
        """Return a layer's attention and the pages that it attends to."""
        return self._layers[index]

    def read(self, layer: int, page: int) -> tuple[F32, F32]:
        """Return copies of K and V of one page, float32 of shape (16, kv_heads, D)."""
        pages = self._layers[layer]
        k, v = (t[page].to(torch.float32, copy=True).numpy() for t in (pages.k, pages.v))
        return k, v

    def zero(self, pages: Sequence[int]) -> None:
        """Zero pages before a sequence takes them."""
        for k, v in self._owned:
            k[list(pages)] = 0
            v[list(pages)] = 0
