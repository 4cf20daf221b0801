"""What a loader has to know of a family: how to read a description, and what tensors are called.

A family is one module: `describe` maps the keys of a config.json to an `Arch`, `describe_gguf`
those of a GGUF header, where llama.cpp has the family. `config_arch` and `gguf_arch` hold what
they share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.models.arch import Arch
from slipstream.models.loading.keys import Keys
from slipstream.models.weights import F32

# Names inside a layer of a Hugging Face checkpoint.
LAYER = {
    "attn_norm": "input_layernorm.weight",
    "attn_out": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    **{part: f"self_attn.{part}_proj.weight" for part in "qkv"},
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    **{f"{part}_norm": f"self_attn.{part}_norm.weight" for part in "qk"},
}
# The same where a layer has four norms.
SANDWICH_LAYER = LAYER | {
    "post_attn_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "post_ffn_norm": "post_feedforward_layernorm.weight",
    "scale": "layer_scalar",
}


class GgufHeader(Protocol):
    """A GGUF header as a family reads it."""

    @property
    def keys(self) -> Keys:
        """The keys of its architecture, without the prefix."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    def has(self, tensor: str) -> bool:
        """Return whether there is a tensor of that name."""

    def numbers(self, tensor: str) -> F32:
        """Read a small tensor."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of decoders.

    Attributes:
        model_types: what config.json calls it.
        describe: maps config.json to the decoder.
        layer_names: names of roles inside a layer.
        norm_shift: 1 where the checkpoint holds w for norms of 1 + w.
        gguf: what `general.architecture` calls it, None where llama.cpp lacks it.
        describe_gguf: maps a GGUF header to the decoder.
    """

    model_types: tuple[str, ...]
    describe: Callable[[Keys], Arch]
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER)
    norm_shift: float = 0.0
    gguf: str | None = None
    describe_gguf: Callable[[GgufHeader], Arch] | None = None
