"""How fast this machine's cores read memory together: the bound of a memory-bound step.

Each thread reads a block of its own, eight times a 32 MB last-level cache, with several readers
that keep no result (numpy's reductions, the C library's memchr); they release the interpreter
lock. The fastest reader with the fastest thread count counts, so the bound is not flattered. A
model smaller than a few caches may stay partly cached between steps and beat it a little.
"""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

BLOCK_BYTES = 256 << 20


def bandwidth_of(backend: Any, repeats: int) -> tuple[float, str]:
    """Return bytes per second of the memory that a back end's steps read, and what measured it.

    A back end with memory of its own measures that itself.
    """
    own = getattr(backend, "bandwidth", None)
    return read_bandwidth(repeats) if own is None else own()


def read_bandwidth(repeats: int) -> tuple[float, str]:
    """Return bytes per second of the fastest reader, and its name with the thread count."""
    num_threads = len(os.sched_getaffinity(0))
    blocks = [np.ones(BLOCK_BYTES // 8, np.int64) for _ in range(num_threads)]
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    readers = {
        "sum": lambda index: blocks[index].sum(),
        "bitwise or": lambda index: np.bitwise_or.reduce(blocks[index]),
        "memchr": lambda index: memchr(blocks[index].ctypes.data, 7, BLOCK_BYTES),
    }
    best = (0.0, "")
    with ThreadPoolExecutor(num_threads) as pool:
        for name, reader in readers.items():
            for threads in range(1, num_threads + 1):
                for _ in range(repeats):
                    start = time.perf_counter()
                    list(pool.map(reader, range(threads)))
                    rate = threads * BLOCK_BYTES / (time.perf_counter() - start)
                    best = max(best, (rate, f"{name}, {threads} thread{'s' * (threads > 1)}"))
    return best
