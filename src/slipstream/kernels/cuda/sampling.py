"""Picks the tokens of sampled rows on the device, before the step's one synchronisation.

The definition is engine/sampling: the same token, to the last bit, as numpy finds on the same
logits. Rows that top-k or top-p filter are sorted, stably, so equal logits keep the order of ids;
sums of weights are sums of whole numbers. A row without a finite largest logit gives -1.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from slipstream.kernels.cuda.compiler import SOURCES, Kernel, compile_kernels
from slipstream.kernels.ops import Picks

SAMPLING_KERNELS = ("largest_logits", "weigh_row", "pick_tokens")
# Pick in sampling.cu.
_PICK = np.dtype(
    [
        ("temperature", np.float32),
        ("min_weight", np.float32),
        ("seed_low", np.uint32),
        ("seed_high", np.uint32),
        ("choice", np.uint32),
        ("position", np.uint32),
        ("weight_scale", np.float32),
        ("unused", np.int32),
    ]
)
_BLOCKS, _THREADS = 64, 256
_MOST_BITS = 50


class DeviceSampler:
    """Picks for a step's logits.

    Args:
        logits: float32 of shape (max_logits, V).
        out: int32 of shape (max_logits,), where picks go; host memory that the device sees.
        cache: folder of compiled kernels, None for none.
    """

    def __init__(self, logits: torch.Tensor, out: torch.Tensor, cache: Path | None) -> None:
        self._logits, self._out = logits, out
        most, vocab = logits.shape
        module = compile_kernels(SOURCES / "sampling.cu", names=SAMPLING_KERNELS, cache=cache)
        self._largest_logits, self._weigh_row, self._pick_tokens = map(
            module.kernel, SAMPLING_KERNELS
        )
        # Sums over a vocabulary stay below 2**53.
        self._weight_scale = 2.0 ** min(_MOST_BITS, 53 - math.ceil(math.log2(vocab)))
        self._host = torch.zeros(most, _PICK.itemsize, dtype=torch.uint8).pin_memory()
        self._host_picks = self._host.numpy().view(_PICK)[:, 0]
        self._picks = torch.zeros_like(self._host, device="cuda")
        self._largest = torch.zeros(most, dtype=torch.int32, device="cuda")
        self._found = torch.zeros(most, dtype=torch.int64, device="cuda")
        self._arrivals = torch.zeros(most, dtype=torch.int32, device="cuda")
        self._cut_values = torch.zeros(most, device="cuda")
        self._cut_ids = torch.zeros(most, dtype=torch.int64, device="cuda")

    def launch(self, picks: Picks) -> None:
        """Pick on the current stream, behind the logits."""
        count, vocab = len(picks.temperatures), self._logits.shape[1]
        host = self._host_picks[:count]
        host["temperature"] = picks.temperatures
        host["min_weight"] = (picks.min_p * self._weight_scale).astype(np.float32)
        host["seed_low"] = (picks.seeds & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        host["seed_high"] = (picks.seeds >> np.uint64(32)).astype(np.uint32)
        host["choice"], host["position"] = picks.choices, picks.positions
        host["weight_scale"] = self._weight_scale
        self._picks[:count].copy_(self._host[:count], non_blocking=True)
        self._largest[:count].zero_()
        self._cut_values[:count].fill_(-math.inf)
        self._start(self._largest_logits, count, self._logits, self._largest, vocab)
        for row in np.flatnonzero(picks.temperatures):
            top_k, top_p = int(picks.top_k[row]), float(picks.top_p[row])
            if 0 < top_k < vocab or top_p < 1:
                self._cut(int(row), top_k if 0 < top_k < vocab else vocab, top_p)
        self._start(
            self._pick_tokens,
            count,
            *(self._logits, self._largest, self._picks, self._cut_values, self._cut_ids),
            *(self._found, self._arrivals, self._out, vocab),
        )

    def _cut(self, row: int, top_k: int, top_p: float) -> None:
        """Find the last token that top-k and top-p keep."""
        vocab = self._logits.shape[1]
        weights = None
        if top_p < 1:
            weights = torch.empty(vocab, dtype=torch.int64, device="cuda")
            arguments = (self._logits, self._largest, self._picks, weights, vocab, row)
            self._weigh_row.launch((_BLOCKS, 1, 1), (_THREADS, 1, 1), arguments)
        value, token_id = last_kept(self._logits[row], weights, top_k=top_k, top_p=top_p)
        self._cut_values[row : row + 1] = value
        self._cut_ids[row : row + 1] = token_id

    @staticmethod
    def _start(kernel: Kernel, rows: int, *arguments: object) -> None:
        kernel.launch((_BLOCKS, rows, 1), (_THREADS, 1, 1), arguments)


def last_kept(
    logits: torch.Tensor, weights: torch.Tensor | None, *, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return value and id of the last token that filters keep, in the order (logit, then id).

    Args:
        logits: float32 of shape (V,); NaN is no candidate.
        weights: whole numbers of shape (V,), for top_p below 1.
        top_k: in [1, V].

    Returns:
        Float32 and int64, each of shape (1,); nothing waits for the device.
    """
    # Adding 0 makes -0 and 0 one value, as they are to numpy.
    clean = torch.where(logits.isnan(), -math.inf, logits) + 0.0
    values, ids = torch.sort(clean, descending=True, stable=True)
    values, ids = values[:top_k], ids[:top_k]
    last = (values > -math.inf).sum() - 1
    if weights is not None:
        ranks = torch.arange(len(ids), device=ids.device)
        sums = torch.where(ranks <= last, weights[ids], 0).cumsum(0)
        target = torch.ceil(top_p * sums[-1:].double()).clamp(min=1).long()
        last = torch.minimum(torch.searchsorted(sums, target)[0], last)
    place = last.clamp(min=0).view(1)
    return values.gather(0, place), ids.gather(0, place)
