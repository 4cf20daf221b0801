"""How fast a GPU copies its own memory: the bound of a memory-bound step."""

from __future__ import annotations

import statistics

import torch

BUFFER_BYTES = 8 << 30  # a copy of 2 GB reaches two thirds of what one of 8 GB does
COPIES = 9  # the first two warm up


def copy_bandwidth() -> float:
    """Return bytes read and written a second by a copy of 8 GB, the median of 7.

    Where less than twice that is free, of what fits.
    """
    free, _ = torch.cuda.mem_get_info()
    size = min(BUFFER_BYTES, (free + torch.cuda.memory_reserved()) // 5 * 2)
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    seconds = [_copy_s(target, source) for _ in range(COPIES)][2:]
    return 2 * source.nbytes / statistics.median(seconds)


def _copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
    """Return the seconds that the device takes for a copy."""
    start: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3
