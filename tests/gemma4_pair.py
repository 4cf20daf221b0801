"""Tiny random pairs of a Gemma 4 target and its assistant, made and saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW, VOCAB, HIDDEN = 12, 128, 64


def text_config(layers: list[str], **changes: Any) -> Gemma4TextConfig:
    """Return a small text model's configuration with the 12B's features."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": 256,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    }
    return Gemma4TextConfig(**(fields | changes))


def make_pair(
    folder: Path, *, shared: int = 0, clustered: bool = False, seed: int = 0
) -> tuple[Any, Any]:
    """Make a pair in float32, save it as folder/target and folder/assistant, and return it.

    Args:
        shared: upper layers of the target that attend to the KV of lower ones.
        clustered: whether the assistant looks into its vocabulary's best clusters alone.
    """
    torch.manual_seed(seed)
    layers = [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL]
    target = Gemma4ForCausalLM(text_config(layers, num_kv_shared_layers=shared))
    own = [SLIDING, SLIDING, FULL]
    config = Gemma4AssistantConfig(
        text_config=text_config(
            own, hidden_size=32, intermediate_size=48, num_kv_shared_layers=len(own)
        ),
        backbone_hidden_size=HIDDEN,
        use_ordered_embeddings=clustered,
        num_centroids=16,
        centroid_intermediate_top_k=3,
    )
    assistant = Gemma4AssistantForCausalLM(config)
    for model, name in ((target, "target"), (assistant, "assistant")):
        _randomise(model.float().eval())
        model.save_pretrained(folder / name)
    return target, assistant


def _randomise(model: Any) -> None:
    """Draw weights that make every part matter."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.uniform_(0.3, 0.6)  # scores are not scaled: larger ones amplify rounding
            elif weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, weight.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.2)
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(VOCAB))
