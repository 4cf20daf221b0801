"""The model in plain float32, independent of our code: what a quantized forward is compared with.

transformers' Llama runs on the file's weights dequantised by the gguf package. GGUF stores the rows
of q and k reordered for interleaved rotation; transformers rotates halves, so the order is undone.
Needs `pip install torch transformers gguf`; nothing of Slipstream is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def float32_reference(path: Path) -> Callable[[list[int]], F32]:
    """Return a function from the token ids of a window to its logits, float32 of shape (R, V)."""
    import torch
    from gguf import GGUFReader
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(path)
    config = _config(reader)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager"))
    model = model.to_empty(device="cpu").float().eval()
    # Buffers (the rotary frequencies) have no place in the file and are computed afresh.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    weights = {name: torch.from_numpy(values) for name, values in _weights(reader, config)}
    if config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)

    def logits(token_ids: list[int]) -> F32:
        with torch.inference_mode():
            output: F32 = model(torch.tensor([token_ids])).logits[0].numpy()
        return output

    return logits


def _config(reader: Any) -> dict[str, Any]:
    def value(key: str, default: Any = None) -> Any:
        field = reader.fields.get(f"llama.{key}")
        return default if field is None else field.contents()

    names = {tensor.name for tensor in reader.tensors}
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return {
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "vocab_size": int(embedding.shape[1]),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": value("rope.freq_base", 1e4)},
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": "output.weight" not in names,
    }


def _weights(reader: Any, config: dict[str, Any]) -> Any:
    """Yield transformers' name and the dequantised values of every tensor."""
    from gguf.quants import dequantize

    outer = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name in outer:
            yield outer[tensor.name], values
            continue
        _, index, kind, _ = tensor.name.split(".")
        if kind in heads:
            values = _halves(values, heads[kind])
        yield f"model.layers.{index}.{_LAYER_NAMES[kind]}.weight", values


def _halves(values: F32, num_heads: int) -> F32:
    """Put each head's rows from pairs (2i, 2i + 1) back to halves (i, i + D / 2)."""
    n, k = values.shape
    paired = values.reshape(num_heads, n // num_heads // 2, 2, k)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(n, k)
