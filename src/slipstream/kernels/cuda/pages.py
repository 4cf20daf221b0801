"""KV pages on the device, laid out as the attention kernel's tensor cores read them.

A page holds 16 positions of every layer: per layer first the keys, then the values, each KV head
for itself. Layers are outermost, so that a layer's context lies within few pages of the GPU's own
address translation. Head sizes are padded with zeros to whole words. Within a head, elements
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
from slipstream.models.arch import (
    EMBEDDING_SCALE,
    GELU,
    K_IS_V,
    LOGIT_SOFTCAP,
    MIXED_ATTENTION,
    POST_NORMS,
    QK_NORM,
    QKV_BIAS,
    ROPE_MAGNITUDE,
    SCORE_SCALE,
    SCORE_SOFTCAP,
    SHARED_KV,
    SLOWER,
    V_NORM,
    WINDOW,
    Arch,
    AttentionArch,
)

WHO = "the cuda back end"
# Features of `Arch` beyond a plain llama that the kernels run.
SUPPORTED = frozenset(
    {
        *(ROPE_MAGNITUDE, SCORE_SCALE, WINDOW, SCORE_SOFTCAP, QK_NORM, V_NORM, K_IS_V, QKV_BIAS),
        *(MIXED_ATTENTION, SHARED_KV, GELU, EMBEDDING_SCALE, POST_NORMS, LOGIT_SOFTCAP),
    }
)
MAX_HEAD_DIM = 512  # beyond it a norm's row does not fit a warp's registers


@dataclass(frozen=True, kw_only=True, eq=False)
class KVLayer:
    """What one layer attends to.

    Attributes:
        attention: the layer's own.
        pages: of the layer that owns them, fp16 of shape (num_pages, 2 * kv_heads * 16 *
            padded_dim).
        cos, sin: of the layer's rotation, float32 of shape (max_len, D / 2).
    """

    attention: AttentionArch
    pages: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def padded_dim(self) -> int:
        """The head size in pages and queries."""
        return padded_head_dim(self.attention.head_dim)

    @property
    def max_len(self) -> int:
        """Positions that have a rotation."""
        return len(self.cos)


class CudaKVCache:
    """fp16 pages of every layer that owns its keys and values; alike layers lie in one tensor.

    Raises:
        LoadError: a head size that the kernels do not take.
        CapacityError: the device has no memory for the pages.
    """

    def __init__(self, arch: Arch, num_pages: int, max_len: int) -> None:
        arch.require(SUPPORTED, WHO, SLOWER)
        for attention in arch.attention:
            if attention.head_dim % 16 or attention.head_dim > MAX_HEAD_DIM:
                raise LoadError(
                    f"{WHO} takes head sizes that are multiples of 16 up to "
                    f"{MAX_HEAD_DIM}, got {attention.head_dim}"
                )
        self.arch = arch
        self.num_pages = num_pages
        self.max_len = max_len
        self._tables: dict[tuple[tuple[float, ...], float], tuple[torch.Tensor, torch.Tensor]] = {}
        try:
            self._alike = [
                torch.zeros((len(owners), num_pages, size), dtype=torch.float16, device="cuda")
                for size, owners in _owners(arch).items()
            ]
            for attention in arch.attention:
                self._table_of(attention)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the GPU has no memory for the KV of {num_pages * PAGE_SIZE} tokens",
                hint="lower kv_tokens, or max_num_seqs and max_model_len, which it comes from",
            ) from error
        self.pages = {
            owner: tensor[place]
            for tensor, owners in zip(self._alike, _owners(arch).values(), strict=True)
            for place, owner in enumerate(owners)
        }

    def layer(self, index: int) -> KVLayer:
        """Return a layer's attention and the pages that it attends to."""
        attention = self.arch.attention[index]
        cos, sin = self._table_of(attention)
        pages = self.pages[self.arch.kv_layers[index]]
        return KVLayer(attention=attention, pages=pages, cos=cos, sin=sin)

    def read(self, layer: int, page: int) -> tuple[F32, F32]:
        """Return copies of K and V of one page, float32 of shape (16, kv_heads, D)."""
        of = self.layer(layer)
        head_dim, shape = of.attention.head_dim, (2, of.attention.num_kv_heads, -1)
        k, v = of.pages[page].cpu().numpy().reshape(shape).astype(np.float32)
        keys, values = _places(of.padded_dim)
        return tuple(  # type: ignore[return-value]
            heads[:, places].transpose(1, 0, 2)[:, :, :head_dim].copy()
            for heads, places in ((k, keys), (v, values))
        )

    def zero(self, pages: Sequence[int]) -> None:
        """Zero pages before a sequence takes them."""
        for first, end in _runs(pages):
            for tensor in self._alike:
                tensor[:, first:end].zero_()

    def _table_of(self, attention: AttentionArch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of a layer's rotation; equal rotations share them."""
        key = (attention.frequencies, attention.rope_magnitude)
        if key not in self._tables:
            tables = rope_tables(key[0], self.max_len, key[1])
            cos, sin = (torch.from_numpy(table).cuda() for table in tables)
            self._tables[key] = cos, sin
        return self._tables[key]


def padded_head_dim(head_dim: int) -> int:
    """Return the head size in pages and queries.

    The warps that share a head, one for 128 columns, have whole words of 32 columns each.
    """
    multiple = 128 if head_dim > 256 else 64 if head_dim > 128 else 32
    return -(-head_dim // multiple) * multiple


def page_bytes(arch: Arch) -> int:
    """Return the bytes of one page, all layers that own pages together."""
    return sum(2 * size * len(owners) for size, owners in _owners(arch).items())


def _owners(arch: Arch) -> dict[int, list[int]]:
    """Return the layers that own pages, by the numbers that a page of theirs holds."""
    found: dict[int, list[int]] = {}
    for index, attention in enumerate(arch.attention):
        if arch.owns_kv(index):
            padded = padded_head_dim(attention.head_dim)
            size = 2 * attention.num_kv_heads * PAGE_SIZE * padded
            found.setdefault(size, []).append(index)
    return found


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
