"""KV pages on the device, laid out as the attention kernel's tensor cores read them.

A page holds 16 positions of every layer: per layer first the keys, then the values, each KV head
for itself. Layers are outermost, so that a layer's context lies within few pages of the GPU's own
address translation. Head sizes are padded with zeros to a multiple of 32. Within a head, elements
stand in the order in which the lanes of a warp take them (see `key_place` in source/layers.cu and
the module comment of source/attention.cu); `read` puts them back in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slipstream.errors import CapacityError, LoadError
from slipstream.kernels.ops import F32, PAGE_SIZE
from slipstream.kernels.rope import rope_tables
from slipstream.models.arch import SLOWER, Arch

HEAD_MULTIPLE = 32  # columns of a 16-byte word of four lanes
WHO = "the cuda back end"
SUPPORTED: frozenset[str] = frozenset()  # features of `Arch` beyond a plain llama
MAX_HEAD_DIM = 256  # beyond it the sums of sixteen rows do not fit a warp's registers


@dataclass(frozen=True, kw_only=True)
class KVLayer:
    """One layer's share of every page."""

    cache: CudaKVCache
    index: int

    @property
    def pages(self) -> torch.Tensor:
        """This layer's pages."""
        return self.cache.pages[self.index]


class CudaKVCache:
    """fp16 pages of every layer, (layers, num_pages, 2 * kv_heads * 16 * padded head size).

    Raises:
        LoadError: a head size that the kernels do not take.
        CapacityError: the device has no memory for the pages.
    """

    def __init__(self, arch: Arch, num_pages: int, max_len: int) -> None:
        arch.require(SUPPORTED, WHO, SLOWER)
        attention = arch.uniform
        if attention.head_dim % 16 or attention.head_dim > MAX_HEAD_DIM:
            raise LoadError(
                f"{WHO} takes head sizes that are multiples of 16 up to "
                f"{MAX_HEAD_DIM}, got {attention.head_dim}"
            )
        self.attention = attention
        self.num_pages = num_pages
        self.max_len = max_len
        self.padded_dim = padded_head_dim(arch)
        cos, sin = rope_tables(attention.frequencies, max_len)
        shape = (arch.num_layers, num_pages, page_bytes(arch) // arch.num_layers // 2)
        try:
            self.cos, self.sin = (torch.from_numpy(table).cuda() for table in (cos, sin))
            self.pages = torch.zeros(shape, dtype=torch.float16, device="cuda")
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the GPU has no memory for the KV of {num_pages * PAGE_SIZE} tokens",
                hint="lower kv_tokens, or max_num_seqs and max_model_len, which it comes from",
            ) from error

    def layer(self, index: int) -> KVLayer:
        """Return one layer's share of every page."""
        return KVLayer(cache=self, index=index)

    def read(self, layer: int, page: int) -> tuple[F32, F32]:
        """Return copies of K and V of one page, float32 of shape (16, kv_heads, D)."""
        shape = (2, self.attention.num_kv_heads, -1)
        k, v = self.pages[layer, page].cpu().numpy().reshape(shape).astype(np.float32)
        keys, values = _places(self.padded_dim)
        head_dim = self.attention.head_dim
        return tuple(  # type: ignore[return-value]
            heads[:, places].transpose(1, 0, 2)[:, :, :head_dim].copy()
            for heads, places in ((k, keys), (v, values))
        )

    def zero(self, pages: Sequence[int]) -> None:
        """Zero pages before a sequence takes them."""
        for first, end in _runs(pages):
            self.pages[:, first:end].zero_()


def padded_head_dim(arch: Arch) -> int:
    """Return the head size in pages and queries."""
    return -(-arch.uniform.head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE


def page_bytes(arch: Arch) -> int:
    """Return the bytes of one page, all layers together."""
    heads = arch.num_layers * arch.uniform.num_kv_heads
    return 2 * 2 * heads * PAGE_SIZE * padded_head_dim(arch)


def _places(padded_dim: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return where key and value elements stand in a head's share, each of shape (16, D)."""
    slot = np.arange(PAGE_SIZE)[:, None]
    d = np.arange(padded_dim)[None]
    lane = (2 * (slot // 4) + slot % 2) * 4 + d % 32 // 8
    keys = ((d // 32 * 2 + slot % 4 // 2) * 32 + lane) * 8 + d % 8
    values = (d // 16 * 32 + d % 8 * 4 + slot // 4) * 8 + d % 16 // 8 * 4 + slot % 4
    return keys, values


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield page numbers as (first, end) of neighbours; [4, 3, 9] gives (3, 5) and (9, 10)."""
    ordered = sorted(pages)
    start = 0
    for i in range(1, len(ordered) + 1):
        if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
            yield ordered[start], ordered[i - 1] + 1
            start = i
