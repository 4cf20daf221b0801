"""The KV pages of the CPU back end, and what each layer's attention is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import LoadError
from slipstream.kernels.cpu import _native
from slipstream.kernels.ops import F32, PAGE_SIZE
from slipstream.kernels.rope import rope_tables
from slipstream.models.arch import Arch, AttentionArch


@dataclass(frozen=True, kw_only=True)
class CpuKVLayer:
    """One layer as the recorders take it.

    Attributes:
        cache: keeps alive what programs point into.
        index: of the layer; it finds the pages that it attends to.
    """

    cache: CpuKVCache
    index: int
    attention: AttentionArch

    @property
    def place(self) -> tuple[Any, int]:
        """The native pages and the layer's index."""
        return self.cache.native, self.index


class CpuKVCache:
    """fp16 pages of 16 positions: K with positions innermost, V with head_dim innermost.

    Raises:
        LoadError: a head size that no vector divides, or layers that share KV of unlike heads.
    """

    def __init__(self, arch: Arch, num_pages: int, max_len: int) -> None:
        for attention in set(arch.attention):
            check_heads(attention)
        self.num_pages = num_pages
        self.max_len = max_len
        self._arch = arch
        rotations = {(a.frequencies, a.rope_magnitude) for a in arch.attention}
        self._tables = {own: rope_tables(own[0], max_len, own[1]) for own in rotations}
        layers = [self._describe(index) for index in range(arch.num_layers)]
        self.native = _native.KV(layers, num_pages)

    def layer(self, index: int) -> CpuKVLayer:
        """Return the handle that the recorders take."""
        return CpuKVLayer(cache=self, index=index, attention=self._arch.attention[index])

    def read(self, layer: int, page: int) -> tuple[F32, F32]:
        """Return copies of K and V of one page, float32 of shape (16, kv_heads, D)."""
        attention = self._arch.attention[layer]
        heads, d = attention.num_kv_heads, attention.head_dim
        k = self.native.read(layer, page, False).view(np.float16).astype(np.float32)
        v = self.native.read(layer, page, True).view(np.float16).astype(np.float32)
        return (
            k.reshape(heads, d, PAGE_SIZE).transpose(2, 0, 1).copy(),
            v.reshape(heads, PAGE_SIZE, d).transpose(1, 0, 2).copy(),
        )

    def zero(self, pages: Sequence[int]) -> None:
        """Zero pages before a sequence takes them."""
        for page in pages:
            self.native.zero(page)

    def _describe(self, index: int) -> Any:
        own, owner = self._arch.attention[index], self._arch.kv_layers[index]
        kept = self._arch.attention[owner]
        if (own.num_kv_heads, own.head_dim) != (kept.num_kv_heads, kept.head_dim):
            raise LoadError(
                f"layer {index} attends to {own.num_kv_heads} KV heads of {own.head_dim}, but "
                f"layer {owner}, whose KV it shares, has {kept.num_kv_heads} of {kept.head_dim}"
            )
        cos, sin = self._tables[own.frequencies, own.rope_magnitude]
        return _native.KVLayer(
            owner=owner,
            heads=own.num_heads,
            kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            cos=cos,
            sin=sin,
            interleaved=own.rope_interleaved,
            scale=own.scale,
            window=own.window,
            softcap=own.softcap,
            v_norm=own.v_norm,
            k_is_v=own.k_is_v,
        )


def check_heads(attention: AttentionArch) -> None:
    """Refuse head sizes that the kernels do not take.

    Raises:
        LoadError: it names the size.
    """
    size = attention.head_dim
    if size % PAGE_SIZE or size > _native.MAX_HEAD_DIM:
        raise LoadError(
            f"the cpu back end takes head sizes that are multiples of {PAGE_SIZE} up to "
            f"{_native.MAX_HEAD_DIM}, got {size}"
        )
