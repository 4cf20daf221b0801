"""transformers' own decoding on a GPU beside which ours is put: SmolLM2's shape, batch 1, greedy.

The model has the shape of a GGUF file and random bfloat16 weights, which cost what its own would;
`generate` runs as it does by default, eagerly, and for comparison with a static cache compiled by
torch. Time is from the first new token to the last.

    python benchmarks/transformers_gpu.py [smollm2-135m] [--tokens 128] [--compile] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from slipstream.models.loading import open_model, resolve_model

PROMPT_TOKENS = 40  # a usual question's
TRIALS = 3


def random_model(name: str) -> Any:
    """Return transformers' model of a file's shape."""
    arch = open_model(resolve_model(name)).arch
    config = transformers.LlamaConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.ffn_size,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.uniform.num_heads,
        num_key_value_heads=arch.uniform.num_kv_heads,
        max_position_embeddings=arch.context_len,
        tie_word_embeddings=arch.tied_embedding,
    )
    model = transformers.LlamaForCausalLM(config)
    return model.to(torch.bfloat16).cuda().eval()


def tokens_per_s(model: Any, tokens: int, **settings: Any) -> float:
    """Return the best of a few trials, after one that warms up."""
    prompt = torch.randint(5, 1000, (1, PROMPT_TOKENS), device="cuda")

    def seconds(new_tokens: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **settings,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(tokens)
    first = statistics.median(seconds(1) for _ in range(TRIALS))
    return (tokens - 1) / (min(seconds(tokens) for _ in range(TRIALS)) - first)


def main() -> None:
    """Measure, print, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--compile", action="store_true", help="also a compiled static cache")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = random_model(arguments.model)
    found = {"eager": tokens_per_s(model, arguments.tokens)}
    print(f"eager: {found['eager']:.1f} tokens/s", flush=True)
    if arguments.compile:
        found["static cache, compiled"] = tokens_per_s(
            model, arguments.tokens, cache_implementation="static"
        )
    line = json.dumps(
        {
            "schema": "slipstream.transformers_gpu/1",
            "model": arguments.model,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokens_per_s": found,
        }
    )
    if arguments.json:
        arguments.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
