"""The tokenizers of GGUF files whose ids on awkward text were recorded."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from slipstream.models.loading.gguf import read_gguf
from slipstream.models.loading.gguf_tokenizer import read_tokenizer
from slipstream.models.loading.tokenizer import Tokenizer
from tests.gguf_files import real_model
from tests.json_tokenizers import RECORD

TEXTS: list[str] = RECORD["texts"]
CASES = list(RECORD["ids"])
# A vocabulary of one kind or another, by its own name, without the rule behind it.
NAMES = {name: name for name in RECORD["vocabularies"]} | {"smollm2-135m": "smollm2-135m"}


@functools.cache
def tokenizer(case: str) -> Tokenizer:
    name = max((name for name in NAMES if case.startswith(name)), key=len)
    pre = case.removeprefix(name).strip()
    metadata: dict[str, Any] = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    if name == "smollm2-135m":
        metadata |= read_gguf(real_model()).metadata
    else:
        keys = RECORD["vocabularies"][name]
        metadata |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        for key, kind in (("scores", np.float32), ("token_type", np.int32)):
            if key in keys:
                metadata[f"tokenizer.ggml.{key}"] = np.array(keys[key], kind)
    if pre:
        metadata["tokenizer.ggml.pre"] = pre
    return read_tokenizer(metadata)
