"""What a distillation does: every number that decides the result, each with one default.

Two runs of one recipe on a CPU make the same checkpoint; on a GPU, sums in another order tell them
apart. docs/benchmark_results/assistant-smollm2.md says what the shipped checkpoint was made with
and what else was tried.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import ConfigError
from slipstream.models.arch import Arch


def _setting(default: Any, help: str, low: float = 1, high: float = 1 << 40) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of one distillation; each is a flag of `slipstream distill`."""

    seed: int = _setting(0, "seeds the conversations, the first weights and the order", 0)
    shards: int = _setting(8, "batches of conversations to write", 2)
    conversations: int = _setting(4096, "conversations of a batch", 2)
    length: int = _setting(640, "tokens of a conversation; a document has twice as many", 32)
    hidden_size: int = _setting(0, "width of the head; 0 takes the target's", 0, 1 << 16)
    ffn_size: int = _setting(0, "width of its MLPs; 0 takes the target's", 0, 1 << 16)
    kv_layers: str = _setting("auto", "target layers whose KV it reads, e.g. 18,23; auto")
    feature_layers: str = _setting("auto", "layers after which features are taken; auto")
    draft_vocab_size: int = _setting(8192, "tokens that it can draft")
    clusters: int = _setting(0, "clusters of these tokens; 0 looks at all in every step", 0)
    top_clusters: int = _setting(32, "of these, how many a draft step looks into")
    lean: bool = _setting(False, "leave out the matrices of the token and of the state's way on", 0)
    bits: int = _setting(4, "bits of its matrices: 4, 8, or 0 for float16", 0, 8)
    max_k: int = _setting(8, "the most tokens that it may be asked for", 1, 15)
    steps: int = _setting(4000, "training steps", 2)
    batch_tokens: int = _setting(20480, "tokens of a training step", 32)
    unroll: int = _setting(4, "draft steps that are trained", 1, 15)
    learning_rate: float = _setting(2e-3, "its peak", 1e-9, 1.0)
    user_weight: float = _setting(0.25, "weight of the user's tokens, a reply's being 1", 0, 1)
    survival: float = _setting(0.8, "how much a step's weight follows the chance to reach it", 0, 1)
    sharpness: float = _setting(1.0, "what multiplies the target's logits", 1e-3, 100)
    choice_weight: float = _setting(0.0, "weight of the chance of the target's choice", 0, 100)
    quantize_from: float = _setting(0.8, "part of the steps after which weights are rounded", 0, 1)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            low, high = item.metadata["low"], item.metadata["high"]
            if item.name in ("kv_layers", "feature_layers"):
                _layers(item.name, value)
            elif not low <= value <= high:
                raise ConfigError(f"{item.name} must be in [{low}, {high}], got {value}")
        if self.clusters and (self.draft_vocab_size % self.clusters):
            raise ConfigError(
                f"draft_vocab_size must be a multiple of clusters, {self.clusters}, "
                f"got {self.draft_vocab_size}"
            )
        if self.clusters and self.top_clusters > self.clusters:
            raise ConfigError(
                f"top_clusters must be at most clusters, {self.clusters}, got {self.top_clusters}"
            )
        if self.bits not in (0, 4, 8):
            raise ConfigError(f"bits must be 0, 4 or 8, got {self.bits}")
        if self.unroll + 2 > self.length:
            raise ConfigError(f"unroll must be below length - 2, got {self.unroll}")

    def given_layers(self, name: str, arch: Arch) -> tuple[int, ...] | None:
        """Return the layers that `kv_layers` or `feature_layers` names, None for auto.

        Raises:
            ConfigError: the target has no such layer.
        """
        layers = _layers(name, getattr(self, name))
        low = 0 if name == "kv_layers" else 1
        high = arch.num_layers - 1 + low
        if layers is not None and not all(low <= number <= high for number in layers):
            raise ConfigError(f"{name} must be in [{low}, {high}], got {list(layers)}")
        return layers


def _layers(name: str, text: str) -> tuple[int, ...] | None:
    if text == "auto":
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise ConfigError(f"{name} must be auto or numbers such as 18,23, got {text!r}")
    return tuple(map(int, parts))
