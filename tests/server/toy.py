"""A model file that a real server loads in no time: two small layers of random weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from tests.gguf_files import F32, Entry, gguf_bytes, toy_entries, toy_metadata

CONTEXT = 4096


def write_toy(folder: Path, *, seed: int = 3) -> Path:
    """Write a toy model and return its path.

    Its words are bytes at random, in loops, so that lookups are accepted now and then.
    """
    random = np.random.default_rng(seed)

    def filled(entry: Entry) -> Entry:
        shape = entry.dims[::-1]
        scale = 1.0 if len(shape) == 1 else 1.5 / entry.dims[0] ** 0.5
        values = random.standard_normal(shape) * scale if len(shape) > 1 else np.ones(shape)
        return dataclasses.replace(entry, data=values.astype(np.float32).tobytes())

    path = folder / "toy.gguf"
    heads = {"llama__attention__head_count": 2, "llama__attention__head_count_kv": 1}
    metadata = toy_metadata(llama__context_length=CONTEXT, llama__rope__dimension_count=16, **heads)
    path.write_bytes(gguf_bytes(metadata, [filled(entry) for entry in toy_entries(F32)]))
    return path
