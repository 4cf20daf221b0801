"""A tiny target with a random assistant on any back end, and what it drafts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from slipstream.kernels.ops import Backend, DraftRows, DraftStep, Int32, KVCache, Step
from slipstream.models.arch import Arch
from slipstream.models.assistant import draft, pack_assistant
from slipstream.models.decoder import DecoderWeights, forward
from slipstream.models.head import HeadCheckpoint, VocabClusters
from slipstream.models.loading.assistant import Assistant
from slipstream.models.loading.assistant_tensors import quantize
from slipstream.models.weights import DenseTensor, Tensor
from tests.assistants import members_of, random_assistant
from tests.tiny import ARCH, TinyTensors, make_rows, tiny_tensors, tiny_weights

FINGERPRINT = "f" * 32


def make_assistant(arch: Arch = ARCH, **options: Any) -> Assistant:
    """Draw a random assistant as its checkpoint would be read."""
    config, values, vocab_map = random_assistant(arch, FINGERPRINT, **options)
    tensors: dict[str, Tensor] = {}
    for name, tensor in values.items():
        if tensor.ndim == 1:
            tensors[name] = DenseTensor(values=tensor, dtype="f32")
        elif config.bits is None:
            tensors[name] = DenseTensor(values=tensor.astype(np.float16), dtype="f16")
        else:
            tensors[name] = quantize(tensor, config.bits)
    members = members_of(config)
    clusters = None
    if members is not None and config.clusters is not None:
        clusters = VocabClusters(members=members, top=config.clusters.top)
    return Assistant(config=config, tensors=tensors, vocab_map=vocab_map, clusters=clusters)


@dataclass(frozen=True)
class DraftingModel:
    """A compiled target that keeps features, and the draft that reads them."""

    arch: Arch
    backend: Backend
    kv: KVCache
    step: Step
    draft: DraftStep

    def read(self, prompts: Sequence[Sequence[int]]) -> tuple[Int32, Int32]:
        """Run the target over whole prompts, whose last tokens choose the anchors.

        Returns:
            The page table, and the row that chose each anchor.
        """
        pages = max(len(prompt) // 16 + 2 for prompt in prompts)
        table = np.arange(len(prompts) * pages, dtype=np.int32).reshape(len(prompts), pages)
        ends = np.cumsum([len(prompt) for prompt in prompts]) - 1
        self.step(
            make_rows(
                [token for prompt in prompts for token in prompt],
                [place for prompt in prompts for place in range(len(prompt))],
                table.tolist(),
                sequences=[i for i, prompt in enumerate(prompts) for _ in prompt],
                logit_rows=ends.tolist(),
            )
        )
        return table, ends.astype(np.int32)


def make_drafting(
    backend: Backend,
    tensors: TinyTensors | None = None,
    assistant: Assistant | None = None,
    *,
    max_rows: int = 128,
    num_pages: int = 64,
) -> DraftingModel:
    """Compile a tiny target and an assistant on a back end."""
    tensors = tensors or tiny_tensors()
    return compile_pair(
        backend,
        tensors.arch,
        tiny_weights(backend, tensors),
        assistant or make_assistant(tensors.arch),
        max_rows=max_rows,
        num_pages=num_pages,
    )


def compile_pair(
    backend: Backend,
    arch: Arch,
    weights: DecoderWeights,
    assistant: HeadCheckpoint,
    *,
    max_rows: int = 128,
    num_pages: int = 64,
) -> DraftingModel:
    """Compile a target and an assistant on a back end."""
    head = assistant.head
    kv = backend.kv_cache(arch, num_pages, arch.context_len)
    step = backend.compile(
        lambda ops: forward(ops, arch, weights, kv, kept_layers=head.feature_layers),
        max_rows=max_rows,
        max_logits=max_rows,
    )
    packed = pack_assistant(backend, assistant, weights)
    run = partial(draft, head=head, weights=packed, kv=kv, k=head.max_k)
    drafts = backend.compile_draft(run, step, max_rows=8, max_k=head.max_k)
    return DraftingModel(arch, backend, kv, step, drafts)


def draft_rows(
    anchors: Sequence[int],
    positions: Sequence[int],
    page_table: Int32,
    kept_rows: Sequence[int] | Int32,
    k: int,
    *,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    choices: Sequence[int] | None = None,
) -> DraftRows:
    """Return DraftRows from plain lists."""
    count = len(anchors)
    return DraftRows(
        token_ids=np.array(anchors, np.int32),
        positions=np.array(positions, np.int32),
        page_table=np.ascontiguousarray(page_table),
        kept_rows=np.array(kept_rows, np.int32),
        k=k,
        temperatures=np.full(count, temperature, np.float32),
        seeds=np.array(range(count) if seeds is None else seeds, np.uint64),
        choices=np.array([0] * count if choices is None else choices, np.uint32),
    )
