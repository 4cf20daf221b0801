"""The compiled kernels of a step, but for its products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from slipstream.errors import LoadError
from slipstream.kernels.cuda.compiler import (
    SOURCES,
    Kernel,
    Module,
    compile_kernels,
    current_device,
)
from slipstream.kernels.cuda.pages import padded_head_dim
from slipstream.models.arch import AttentionArch

Vector = torch.Tensor

SPLIT = 256  # positions of a split of the context; SPLIT_PAGES in attention.cu
RECORD_EXTRA = 4  # floats of a split's sums beside its values; RECORD in attention.cu
# Up to these rows a context is spread over many blocks; more rows are enough blocks themselves, and
# the sums of their splits would be gigabytes.
SPREAD_ROWS = 32
LANES = 4  # pages of a split that are worked on at a time, half of it where four warps share a head
# Pages that a warp has in flight: more than hide the memory's latency only take shared memory.
_MOST_STAGES = 4
_WIDE_HEAD = 128  # wider heads are shared by two warps, beyond 256 by four
_MOST_BLOCKS = 2  # a multiprocessor's; more would only split the context finer

ATTENTION_KERNELS = ("plan_tiles", "attention")
LAYER_KERNELS = (
    *("rms_norm", "round_rows", "pick_rows", "norm_add", "gated", "cap_logits"),
    *("rope_append", "norm_rope"),
)
DRAFT_KERNELS = ("mark_clusters", "pick_drafts")


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
        attention: returns the kernels of a kind of attention.
        overlap: kernels may start while the one before still runs.
        cache: folder of compiled kernels, None for none.
    """

    rms_norm: Kernel
    round_rows: Kernel
    pick_rows: Kernel
    norm_add: Kernel
    gated: Kernel
    cap_logits: Kernel
    rope_append: Kernel
    norm_rope: Kernel
    argmax: Kernel
    attention: Callable[[AttentionArch], AttentionKernel]
    overlap: bool
    cache: Path | None

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
            overlap=current_device().has_clusters,
            cache=cache,
        )


@dataclass(frozen=True, kw_only=True)
class AttentionBuild:
    """Constants of attention.cu for one kind of attention on one device.

    Attributes:
        windowed, capped: there is a window; scores are soft-capped.
        one_place: the sums of a split take the place of its pages.
    """

    padded_dim: int
    stages: int
    one_place: bool
    windowed: bool = False
    capped: bool = False

    @classmethod
    def fitting(
        cls, padded_dim: int, shared_limit: int, *, windowed: bool = False, capped: bool = False
    ) -> AttentionBuild:
        """Return the one with most pages in flight that fits a block's shared memory.

        Raises:
            LoadError: none fits.
        """
        for one_place, least in ((False, 2), (True, 1)):
            for stages in range(_MOST_STAGES, least - 1, -1):
                build = cls(
                    padded_dim=padded_dim,
                    stages=stages,
                    one_place=one_place,
                    windowed=windowed,
                    capped=capped,
                )
                if build.shared_bytes <= shared_limit:
                    return build
        raise LoadError(
            f"heads of {padded_dim} columns do not fit {shared_limit} bytes of shared memory",
            hint="use device cpu",
        )

    @property
    def parts(self) -> int:
        """Warps that share a page's columns."""
        return -(-self.padded_dim // _WIDE_HEAD) if self.padded_dim <= 256 else 4

    @property
    def lanes(self) -> int:
        """Pages of a split that are worked on at a time."""
        return LANES // 2 if self.parts > 2 else LANES

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.lanes * self.parts

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as attention.cu lays it out."""
        lanes = self.lanes
        ring = lanes * self.stages * 2 * 16 * self.padded_dim * 2
        found = lanes * 16 * (self.padded_dim + 8) * 4
        sums = lanes * 16 * 8
        scores = lanes * 2 * self.parts * 2 * 32 * 16 if self.parts > 1 else 0
        return (max(ring, found) if self.one_place else ring + found) + sums + scores

    def defines(self) -> dict[str, int]:
        """Return the macros."""
        return {
            "DIM": self.padded_dim,
            "STAGES": self.stages,
            "ONE_PLACE": int(self.one_place),
            "WINDOWED": int(self.windowed),
            "CAPPED": int(self.capped),
        }


@dataclass(frozen=True, kw_only=True)
class DraftKernels:
    """What a draft launches besides the kernels of a step."""

    mark_clusters: Kernel
    pick_drafts: Kernel

    @classmethod
    def load(cls, cache: Path | None) -> DraftKernels:
        """Compile for the current device.

        Args:
            cache: folder of compiled kernels, None for none.
        """
        module = compile_kernels(SOURCES / "draft.cu", names=DRAFT_KERNELS, cache=cache)
        return cls(**{name: module.kernel(name) for name in DRAFT_KERNELS})


def _load_attention(attention: AttentionArch, cache: Path | None) -> AttentionKernel:
    device = current_device()
    build = AttentionBuild.fitting(
        padded_head_dim(attention.head_dim),
        device.shared_bytes,
        windowed=attention.window > 0,
        capped=attention.softcap > 0,
    )
    module: Module = compile_kernels(
        SOURCES / "attention.cu", names=ATTENTION_KERNELS, defines=build.defines(), cache=cache
    )
    main = module.kernel("attention", shared_bytes=build.shared_bytes)
    fitting = main.blocks_per_multiprocessor(build.threads)
    return AttentionKernel(
        plan=module.kernel("plan_tiles"),
        main=main,
        threads=build.threads,
        num_blocks=device.processors * min(fitting, _MOST_BLOCKS),
    )
