"""A target model ready to run: its shape, its KV pages and its compiled forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from slipstream.config import EngineConfig
from slipstream.drafters.assistant import AssistantHead
from slipstream.drafters.base import Head
from slipstream.engine.budget import RowBudget
from slipstream.engine.draft_model import DraftSource, build_draft_model
from slipstream.engine.memory import MemoryPlan, plan_memory
from slipstream.engine.pages import pages_for
from slipstream.engine.round import padding_multiple
from slipstream.errors import CapacityError, ConfigError
from slipstream.kernels.ops import PAGE_SIZE, Backend, DeviceMemory, KVCache, Step
from slipstream.models.arch import Arch
from slipstream.models.assistant import AssistantWeights, draft, pack_assistant
from slipstream.models.decoder import DecoderWeights, forward
from slipstream.models.head import HeadCheckpoint

KV_ITEM_BYTES = 2  # every back end keeps keys and values in fp16
# Tokens of a conversation that most requests stay within.
ORDINARY_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class Target:
    """A compiled target.

    Attributes:
        max_model_len: prompt and output tokens of a sequence at most.
        plan: how the device's memory is shared out, None where it is the system's own.
        head: what drafts for all sequences in one call, an assistant or a draft model; None for
            nothing.
        head_bytes: weights of the head.
        draft_arch: shape of a draft model, None without one.
    """

    arch: Arch
    backend: Backend
    kv: KVCache
    step: Step
    max_model_len: int
    plan: MemoryPlan | None = None
    head: Head | None = None
    head_bytes: int = 0
    draft_arch: Arch | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the target's own weights, without those of the head."""
        return self.backend.weight_bytes() - self.head_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the KV of one token, all layers together."""
        if self.plan is not None:
            return self.plan.page_bytes // PAGE_SIZE
        return self.arch.kv_width * KV_ITEM_BYTES

    @property
    def draft_kv_token_bytes(self) -> int:
        """The same of a draft model, 0 without one."""
        if self.plan is not None:
            return self.plan.draft_page_bytes // PAGE_SIZE
        return 0 if self.draft_arch is None else self.draft_arch.kv_width * KV_ITEM_BYTES


def build_target(
    arch: Arch,
    backend: Backend,
    load_weights: Callable[[Backend], DecoderWeights],
    config: EngineConfig,
    assistant: HeadCheckpoint | None = None,
    draft: DraftSource | None = None,
) -> Target:
    """Load weights onto a back end, take KV pages, compile the forward.

    Args:
        assistant: a drafter's checkpoint, whose weights come onto the back end as well.
        draft: a draft model, likewise, with as many pages as the target; not beside an assistant.

    Raises:
        ConfigError: max_model_len is beyond what the model was trained for, or max_batch_rows too
            small for max_num_seqs.
        CapacityError: the pages do not fit the memory that the system grants.
    """
    max_model_len = config.max_model_len or arch.context_len
    if max_model_len > arch.context_len:
        raise ConfigError(
            f"max_model_len must be in [1, {arch.context_len}] for this model, got {max_model_len}"
        )
    budget = RowBudget.of(config, arch.vocab_size)
    pad_to = padding_multiple(config)
    max_rows = -(-budget.rows // pad_to) * pad_to
    weights = load_weights(backend)
    plan: MemoryPlan | None = None
    head: Head | None = None
    head_weights, draft_weights = None, None
    target_bytes = backend.weight_bytes()
    if assistant is not None:
        head_weights = pack_assistant(backend, assistant, weights)
    elif draft is not None:
        draft_weights = draft.load_weights(backend)
    head_bytes = backend.weight_bytes() - target_bytes
    kept_layers = () if assistant is None else assistant.head.feature_layers
    memory: DeviceMemory | None = getattr(backend, "memory", None)
    num_pages = pages_for(config.kv_tokens or auto_kv_tokens(max_model_len, config.max_num_seqs))
    if memory is not None:
        # Kept streams are buffers that no other layer takes.
        beside_bytes = len(set(kept_layers)) * max_rows * arch.hidden_size * 4
        if assistant is not None:
            beside_bytes += memory.draft_bytes(
                arch, max_rows=config.max_num_seqs, max_len=max_model_len
            )
        elif draft is not None:
            beside_bytes = memory.workspace_bytes(
                draft.arch,
                max_rows=draft.max_rows(config),
                max_logits=config.max_num_seqs,
                max_len=draft.max_len(max_model_len),
            )
        plan = plan_memory(
            memory,
            arch,
            config,
            weights_bytes=target_bytes,
            drafter_bytes=head_bytes + beside_bytes,
            draft_page_bytes=0 if draft is None else memory.page_bytes(draft.arch),
            max_model_len=max_model_len,
            max_rows=max_rows,
        )
        num_pages = plan.num_pages
    kv = _take_pages(backend, arch, num_pages, max_model_len, "")
    step = backend.compile(
        lambda ops: forward(ops, arch, weights, kv, kept_layers=kept_layers),
        max_rows=max_rows,
        max_logits=budget.logits,
    )
    if assistant is not None and head_weights is not None:
        head = _build_head(backend, assistant, head_weights, kv, step, config, max_model_len)
    elif draft is not None and draft_weights is not None:
        draft_len = draft.max_len(max_model_len)
        head = build_draft_model(
            draft,
            draft_weights,
            _take_pages(backend, draft.arch, num_pages, draft_len, "draft model's "),
            backend,
            config,
            vocab_size=arch.vocab_size,
            max_model_len=max_model_len,
        )
    return Target(
        arch=arch,
        backend=backend,
        kv=kv,
        step=step,
        max_model_len=max_model_len,
        plan=plan,
        head=head,
        head_bytes=head_bytes,
        draft_arch=None if draft is None else draft.arch,
    )


def _take_pages(backend: Backend, arch: Arch, num_pages: int, max_len: int, whose: str) -> KVCache:
    try:
        return backend.kv_cache(arch, num_pages, max_len)
    except MemoryError as error:
        raise CapacityError(
            f"the system grants no memory for the {whose}KV of {num_pages * PAGE_SIZE} tokens",
            hint="lower kv_tokens, or max_num_seqs and max_model_len, which it comes from",
        ) from error


def _build_head(
    backend: Backend,
    assistant: HeadCheckpoint,
    weights: AssistantWeights,
    kv: KVCache,
    step: Step,
    config: EngineConfig,
    max_len: int,
) -> AssistantHead:
    """Compile an assistant's draft for as many tokens as a round may ever ask for."""
    head, max_rows = assistant.head, config.max_num_seqs
    run = partial(draft, head=head, weights=weights, kv=kv, k=head.max_k)
    return AssistantHead(
        backend.compile_draft(run, step, max_rows=max_rows, max_k=head.max_k),
        step,
        max_k=head.max_k,
        max_rows=max_rows,
        max_len=max_len,
    )


def auto_kv_tokens(max_model_len: int, max_num_seqs: int) -> int:
    """Return the KV tokens to reserve where none are asked for.

    Pages take memory only once they are written, so this is generous: a context of ordinary length
    for every sequence, and one full context at least.
    """
    return max(max_model_len, max_num_seqs * min(max_model_len, ORDINARY_LEN))
