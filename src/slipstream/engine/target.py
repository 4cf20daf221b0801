"""A target model ready to run: its shape, its KV pages and its compiled forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.config import EngineConfig
from slipstream.engine.pages import pages_for
from slipstream.engine.round import padding_multiple
from slipstream.errors import ConfigError
from slipstream.kernels.ops import Backend, KVCache, Step
from slipstream.models.arch import Arch
from slipstream.models.decoder import DecoderWeights, forward
from slipstream.types import MAX_K


@dataclass(frozen=True, kw_only=True)
class Target:
    """A compiled target.

    Attributes:
        max_model_len: prompt and output tokens of a sequence at most.
    """

    arch: Arch
    backend: Backend
    kv: KVCache
    step: Step
    max_model_len: int


def build_target(
    arch: Arch,
    backend: Backend,
    load_weights: Callable[[Backend], DecoderWeights],
    config: EngineConfig,
) -> Target:
    """Load weights onto a back end, take pages for one full context, compile the forward.

    Raises:
        ConfigError: max_model_len is beyond what the model was trained for.
    """
    max_model_len = config.max_model_len or arch.context_len
    if max_model_len > arch.context_len:
        raise ConfigError(
            f"max_model_len must be in [1, {arch.context_len}] for this model, got {max_model_len}"
        )
    weights = load_weights(backend)
    kv = backend.kv_cache(arch, pages_for(max_model_len), max_model_len)
    pad_to = padding_multiple(config.verify_pad)
    verify_rows = -(-(MAX_K + 1) // pad_to) * pad_to
    step = backend.compile(
        lambda ops: forward(ops, arch, weights, kv),
        max_rows=max(config.prefill_chunk, verify_rows),
        max_logits=MAX_K + 1,
    )
    return Target(arch=arch, backend=backend, kv=kv, step=step, max_model_len=max_model_len)
