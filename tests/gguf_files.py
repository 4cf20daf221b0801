"""GGUF files for tests, byte by byte, so that every field can be wrong on purpose."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import LoadError
from slipstream.models.loading import resolve_model
from slipstream.models.loading.bytes_map import BYTE_OF

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
Q5_0, Q5_1, Q4_K, Q5_K, Q6_K = 6, 7, 12, 13, 14
ALIGNMENT = 32
BLOCKS = {F32: (1, 4), F16: (1, 2), BF16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q8_0: (32, 34)}
BLOCKS |= {Q5_0: (32, 22), Q5_1: (32, 24), Q4_K: (256, 144), Q5_K: (256, 176), Q6_K: (256, 210)}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "i t", "Ġ Ġ", "Ċ Ċ"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Entry:
    """One tensor; what is left out is computed."""

    name: str
    dims: tuple[int, ...]
    type_id: int = F32
    data: bytes | None = None
    offset: int | None = None


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A typed value; ints are u32, lists are arrays of texts or of i32."""
    if isinstance(item, bytes):  # already typed
        return item
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if item and isinstance(item[0], int):
        return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
    return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))


def header(metadata: Mapping[str, Any], entries: Sequence[Entry]) -> tuple[bytes, bytes]:
    """Return the header, padded, and the data section."""
    data = bytearray()
    directory = b""
    for entry in entries:
        block, block_bytes = BLOCKS.get(entry.type_id, (1, 4))
        raw = entry.data
        if raw is None:
            raw = bytes(int(np.prod(entry.dims)) // block * block_bytes)
        data += bytes(-len(data) % ALIGNMENT)
        offset = len(data) if entry.offset is None else entry.offset
        data += raw
        directory += string(entry.name)
        directory += struct.pack(f"<I{len(entry.dims)}Q", len(entry.dims), *entry.dims)
        directory += struct.pack("<IQ", entry.type_id, offset)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items()) + directory
    return head + bytes(-len(head) % ALIGNMENT), bytes(data)


def gguf_bytes(metadata: Mapping[str, Any], entries: Sequence[Entry] = ()) -> bytes:
    return b"".join(header(metadata, entries))


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def toy_tokens() -> list[str]:
    """Three special tokens, the 256 bytes, one token for each merge."""
    return [*SPECIAL, *BYTE_OF, *(merge.replace(" ", "") for merge in MERGES)]


def toy_tokenizer() -> dict[str, Any]:
    """Metadata of a small byte-level BPE tokenizer."""
    tokens = toy_tokens()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def toy_metadata(**changes: Any) -> dict[str, Any]:
    """Metadata of a two-layer llama; a change to None removes a key, "__" stands for "."."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 8,
        **toy_tokenizer(),
    }
    metadata |= {key.replace("__", "."): item for key, item in changes.items()}
    return {key: item for key, item in metadata.items() if item is not None}


def toy_entries(weight: int = Q8_0) -> list[Entry]:
    """Tensors of that llama; dims innermost first, as the file has them."""
    entries = [
        Entry("token_embd.weight", (32, len(toy_tokens())), weight),
        Entry("output_norm.weight", (32,)),
    ]
    for index in range(2):
        prefix = f"blk.{index}."
        entries += [Entry(f"{prefix}{name}_norm.weight", (32,)) for name in ("attn", "ffn")]
        for name, outputs, inputs in (
            ("attn_q", 32, 32),
            ("attn_k", 16, 32),
            ("attn_v", 16, 32),
            ("attn_output", 32, 32),
            ("ffn_gate", 64, 32),
            ("ffn_up", 64, 32),
            ("ffn_down", 32, 64),
        ):
            entries.append(Entry(f"{prefix}{name}.weight", (inputs, outputs), weight))
    return entries


def toy_bytes(**changes: Any) -> bytes:
    return gguf_bytes(toy_metadata(**changes), toy_entries())


def real_model() -> Path:
    """Return the real model of the cache, or skip."""
    try:
        return resolve_model("smollm2-135m")
    except LoadError as error:
        pytest.skip(error.message)
