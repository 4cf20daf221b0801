"""A draft model beside a target: found, checked, and put onto the target's back end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream.config import EngineConfig
from slipstream.drafters.base import Ask
from slipstream.drafters.draft_model import ORDINARY_ROWS, DraftModel, Pick
from slipstream.engine.pages import PagePool
from slipstream.engine.prefix import PrefixCache
from slipstream.engine.sampling import kernel_beside
from slipstream.kernels.noise import NoiseKey
from slipstream.kernels.ops import F32, Backend, KVCache
from slipstream.models.arch import Arch
from slipstream.models.decoder import DecoderWeights, forward
from slipstream.models.loading import ModelFile
from slipstream.models.loading.same_vocabulary import check_same_vocabulary

_NO_IDS, _NO_VALUES = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A draft model that is not loaded yet.

    Attributes:
        load_weights: as `ModelFile.load_weights`.
    """

    arch: Arch
    load_weights: Callable[[Backend], DecoderWeights]

    def max_len(self, max_model_len: int) -> int:
        """Return the positions that it serves of a target's."""
        return min(max_model_len, self.arch.context_len)

    def max_rows(self, config: EngineConfig) -> int:
        """Return the rows of its widest forward: a chunk, and what every draft reads."""
        return config.prefill_chunk + ORDINARY_ROWS * config.max_num_seqs


def draft_source(target: ModelFile, draft: ModelFile) -> DraftSource:
    """Return a model as a drafter of another.

    Raises:
        MismatchError: their vocabularies differ.
    """
    check_same_vocabulary(target.tokenizer, draft.tokenizer)
    return DraftSource(arch=draft.arch, load_weights=draft.load_weights)


def build_draft_model(
    source: DraftSource,
    weights: DecoderWeights,
    kv: KVCache,
    backend: Backend,
    config: EngineConfig,
    *,
    vocab_size: int,
    max_model_len: int,
) -> DraftModel:
    """Compile a draft model's forward.

    Args:
        kv: its pages.
        vocab_size: the target's.
        max_model_len: likewise.
    """
    step = backend.compile(
        lambda ops: forward(ops, source.arch, weights, kv),
        max_rows=source.max_rows(config),
        max_logits=config.max_num_seqs,
    )
    return DraftModel(
        step,
        PagePool(kv, cache=PrefixCache() if config.prefix_cache == "on" else None),
        pick=_pick_on(backend),
        vocab_size=min(vocab_size, source.arch.vocab_size),
        max_len=source.max_len(max_model_len),
        max_seqs=config.max_num_seqs,
        chunk=config.prefill_chunk,
    )


def _pick_on(backend: Backend) -> Pick:
    """Return what picks a draft as a request's sampler would, penalties apart."""
    kernel = kernel_beside(backend)

    def pick(logits: F32, ask: Ask, position: int) -> int:
        return kernel.pick(
            logits,
            _NO_IDS,
            _NO_VALUES,
            None,
            temperature=ask.temperature,
            top_k=ask.top_k,
            top_p=ask.top_p,
            min_p=ask.min_p,
            key=NoiseKey(seed=ask.seed, choice=ask.choice, position=position),
        )

    return pick
