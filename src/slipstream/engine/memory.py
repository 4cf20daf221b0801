"""One plan for a device's memory: weights, work space and KV under one limit.

Where the back end's memory is the system's own there is no plan: pages take memory only once they
are written. A device hands its memory out at once, so what does not fit is refused before anything
is taken, with the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import EngineConfig
from slipstream.engine.budget import RowBudget
from slipstream.engine.pages import pages_for
from slipstream.errors import CapacityError
from slipstream.kernels.ops import PAGE_SIZE, DeviceMemory
from slipstream.models.arch import Arch


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a device's memory is shared out, in bytes.

    Attributes:
        limit_bytes: what weights, work space and KV may take together.
        drafter_bytes: weights of a drafter, its work space and what the target keeps for it.
        workspace_bytes: activations, logits, graphs.
        page_bytes: a KV page of the target.
        draft_page_bytes: a KV page of a draft model, which has as many of them.
        num_pages: KV pages.
    """

    limit_bytes: int
    weights_bytes: int
    workspace_bytes: int
    page_bytes: int
    num_pages: int
    drafter_bytes: int = 0
    draft_page_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV pages, a draft model's included."""
        return self.num_pages * (self.page_bytes + self.draft_page_bytes)

    @property
    def sum(self) -> str:
        """The plan as a sum, for messages."""
        drafter = f"drafter {_gib(self.drafter_bytes)} + " if self.drafter_bytes else ""
        parts = (
            f"weights {_gib(self.weights_bytes)} + {drafter}"
            f"work space {_gib(self.workspace_bytes)} + "
            f"KV of {self.num_pages * PAGE_SIZE} tokens {_gib(self.kv_bytes)}"
        )
        total = self.weights_bytes + self.drafter_bytes + self.workspace_bytes + self.kv_bytes
        return f"{parts} = {_gib(total)} of {_gib(self.limit_bytes)} GiB"


def plan_memory(
    memory: DeviceMemory,
    arch: Arch,
    config: EngineConfig,
    *,
    weights_bytes: int,
    max_model_len: int,
    max_rows: int,
    drafter_bytes: int = 0,
    draft_page_bytes: int = 0,
) -> MemoryPlan:
    """Share out a device's memory once the weights are there.

    Where no KV tokens are asked for, every sequence gets a full context as far as there is room,
    and one full context is the least.

    Raises:
        CapacityError: the sum is beyond the limit.
    """
    limit = memory.limit_bytes(config.memory_fraction)
    budget = RowBudget.of(config, arch.vocab_size)
    workspace = memory.workspace_bytes(
        arch, max_rows=max_rows, max_logits=budget.logits, max_len=max_model_len
    )
    page_bytes = memory.page_bytes(arch)
    left = limit - weights_bytes - drafter_bytes - workspace
    fitting = max(left // (page_bytes + draft_page_bytes), 0)
    least = pages_for(config.kv_tokens or max_model_len)
    most = pages_for(config.kv_tokens or max_model_len * config.max_num_seqs)
    plan = MemoryPlan(
        limit_bytes=limit,
        weights_bytes=weights_bytes,
        workspace_bytes=workspace,
        page_bytes=page_bytes,
        drafter_bytes=drafter_bytes,
        draft_page_bytes=draft_page_bytes,
        num_pages=max(least, min(fitting, most)),
    )
    if plan.num_pages > fitting:
        raise CapacityError(
            f"the model does not fit memory_fraction {config.memory_fraction}: {plan.sum}",
            hint="lower kv_tokens, max_model_len or max_num_seqs, or raise memory_fraction",
        )
    return plan


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f}"
