"""The compiled kernels of a step, but for its products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from slipstream.kernels.cuda.compiler import SOURCES, Kernel, Module, compile_kernels

Vector = torch.Tensor

SPLIT = 256  # positions of a split of the context; SPLIT_PAGES in attention.cu
RECORD_EXTRA = 4  # floats of a split's sums beside its values; RECORD in attention.cu
# Up to these rows a context is spread over many blocks; more rows are enough blocks themselves, and
# the sums of their splits would be gigabytes.
SPREAD_ROWS = 32
_LANES = 4  # pages of a split that are worked on at a time
# Pages that a warp has in flight: as many as leave room for a block on every multiprocessor.
_STAGES, _STAGES_OF_WIDE_HEADS = 4, 2
_WIDE_HEAD = 128  # wider heads are shared by two warps
_MOST_BLOCKS = 2  # a multiprocessor's; more would only split the context finer

LAYER_KERNELS = ("rms_norm", "round_rows", "pick_rows", "gated", "rope_append")


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """Attention of one head size.

    Attributes:
        threads: of a block.
        num_blocks: blocks that the device runs at a time.
    """

    plan: Kernel
    main: Kernel
    threads: int
    num_blocks: int


@dataclass(frozen=True, kw_only=True)
class StepKernels:
    """What a recorder launches.

    Attributes:
        attention: returns the kernels of a padded head size.
    """

    rms_norm: Kernel
    round_rows: Kernel
    pick_rows: Kernel
    gated: Kernel
    rope_append: Kernel
    argmax: Kernel
    attention: Callable[[int], AttentionKernel]

    @classmethod
    def load(cls, cache: Path | None) -> StepKernels:
        """Compile for the current device.

        Args:
            cache: folder of compiled kernels, None for none.
        """
        layers = compile_kernels(SOURCES / "layers.cu", names=LAYER_KERNELS, cache=cache)
        argmax = compile_kernels(SOURCES / "argmax.cu", names=["argmax"], cache=cache)
        return cls(
            **{name: layers.kernel(name) for name in LAYER_KERNELS},
            argmax=argmax.kernel("argmax"),
            attention=partial(_load_attention, cache=cache),
        )


def attention_stages(padded_dim: int) -> int:
    """Return the pages that each warp has in flight."""
    return _STAGES if padded_dim <= _WIDE_HEAD else _STAGES_OF_WIDE_HEADS


def attention_threads(padded_dim: int) -> int:
    """Return the threads of a block."""
    return 32 * _LANES * _parts(padded_dim)


def attention_shared_bytes(padded_dim: int) -> int:
    """Return the shared memory of a block, as attention.cu lays it out."""
    ring = _LANES * attention_stages(padded_dim) * 2 * 16 * padded_dim * 2
    found = _LANES * 16 * (padded_dim + 8 + 2) * 4
    scores = _LANES * 2 * _parts(padded_dim) * 2 * 32 * 16
    return ring + found + (scores if _parts(padded_dim) > 1 else 0)


def _parts(padded_dim: int) -> int:
    """Return the warps that share a page's columns."""
    return 2 if padded_dim > _WIDE_HEAD else 1


def _load_attention(padded_dim: int, cache: Path | None) -> AttentionKernel:
    module: Module = compile_kernels(
        SOURCES / "attention.cu",
        names=["plan_tiles", "attention"],
        defines={"DIM": padded_dim, "STAGES": attention_stages(padded_dim)},
        cache=cache,
    )
    main = module.kernel("attention", shared_bytes=attention_shared_bytes(padded_dim))
    threads = attention_threads(padded_dim)
    fitting = main.blocks_per_multiprocessor(threads)
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return AttentionKernel(
        plan=module.kernel("plan_tiles"),
        main=main,
        threads=threads,
        num_blocks=device.multi_processor_count * min(fitting, _MOST_BLOCKS),
    )
