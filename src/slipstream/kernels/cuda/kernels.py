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
ATTENTION_THREADS = 128  # four warps; WARPS in attention.cu
_WARPS = ATTENTION_THREADS // 32
# Pages that a warp has in flight: as many as leave room for a block on every multiprocessor.
_STAGES, _STAGES_OF_WIDE_HEADS = 4, 2
_WIDE_HEAD = 128
_MOST_BLOCKS = 2  # a multiprocessor's; more would only split the context finer

LAYER_KERNELS = ("rms_norm", "round_rows", "pick_rows", "gated", "rope_append")


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """Attention of one head size.

    Attributes:
        num_blocks: blocks that the device runs at a time.
    """

    plan: Kernel
    main: Kernel
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


def attention_shared_bytes(padded_dim: int) -> int:
    """Return the shared memory of a block, as attention.cu lays it out."""
    queries = 16 * (padded_dim + (32 if padded_dim % 64 == 0 else 0)) * 2
    ring = _WARPS * attention_stages(padded_dim) * 2 * 16 * padded_dim * 2
    found = _WARPS * 16 * (padded_dim + 8 + 2) * 4
    return queries + ring + found


def _load_attention(padded_dim: int, cache: Path | None) -> AttentionKernel:
    module: Module = compile_kernels(
        SOURCES / "attention.cu",
        names=["plan_tiles", "attention"],
        defines={"DIM": padded_dim, "STAGES": attention_stages(padded_dim)},
        cache=cache,
    )
    main = module.kernel("attention", shared_bytes=attention_shared_bytes(padded_dim))
    fitting = main.blocks_per_multiprocessor(ATTENTION_THREADS)
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return AttentionKernel(
        plan=module.kernel("plan_tiles"),
        main=main,
        num_blocks=device.multi_processor_count * min(fitting, _MOST_BLOCKS),
    )
