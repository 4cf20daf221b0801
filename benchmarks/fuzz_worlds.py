"""Random models for the fuzzer: families, formats, drafters, back ends, each drawn from a seed.

A world is a tiny target with something that drafts, and the same model again on one thread with
nothing that drafts, which says what is right. Models, files and assistants are those of the tests.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.config import EngineConfig
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.draft_model import DraftSource
from slipstream.engine.pairing import MakeDrafter
from slipstream.engine.target import Target, build_target
from slipstream.kernels.cpu.backend import CpuBackend
from slipstream.kernels.ops import Backend
from slipstream.models.head import HeadCheckpoint
from slipstream.models.loading.arch_map import read_checkpoint
from slipstream.models.loading.checkpoint import Checkpoint, tensor_shapes
from slipstream.models.loading.folder import MODEL_TYPES, read_folder
from slipstream.models.loading.gguf import read_gguf
from slipstream.models.loading.heads import read_head
from slipstream.models.loading.weights_map import load_decoder
from tests.drafting import make_assistant
from tests.families import (
    CONFIGS,
    IN_GGUF,
    family_arch,
    folder_name,
    random_checkpoint,
    random_weights,
    write_family_gguf,
    write_folder,
    write_mlx_folder,
)
from tests.quantized import KINDS as QUANTIZED
from tests.tiny import BACKENDS, KINDS, make_backend

# The family that has nothing which an assistant of our own does not read.
_PLAIN = "llama 2"
# Two levels of scales want 256 columns.
_WIDE = {"hidden_size": 256, "intermediate_size": 256}
_HAS_TRANSFORMERS = all(map(importlib.util.find_spec, ("torch", "transformers")))


@dataclasses.dataclass(kw_only=True)
class World:
    """What is compared.

    Attributes:
        what: how it was drawn, for reports.
        target: what drafts are verified by.
        control: the same model on one thread, which never drafts.
        makers: what drafts for every request; empty where each request has a drafter of its own.
        source: token ids that prompts are cut from.
        limits: settings that the targets were compiled for.
    """

    what: dict[str, Any]
    target: Target
    control: Target
    makers: Sequence[MakeDrafter]
    source: list[int]
    limits: dict[str, Any]


def draw_world(draw: random.Random, folder: Path) -> World:
    """Draw a world.

    Args:
        folder: an empty one, for files.
    """
    limits: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "prefill_chunk": 256,
        "kv_tokens": draw.choice([0, 0, 512, 320]),
        "prefix_cache": draw.choice(["on", "on", "off"]),
    }
    isa = draw.choice(["reference", *[name for name in BACKENDS[1:] if _runs(name)] * 8])
    threads, kernel = draw.randint(1, 3), draw.choice(["auto", "auto", "gemv", "tile"])
    what: dict[str, Any] = {"backend": isa, "threads": threads, "kernel": kernel}
    what |= {key: limits[key] for key in ("kv_tokens", "prefix_cache")}
    assistant: HeadCheckpoint | None = None
    draft: Checkpoint | None = None
    pair = _HAS_TRANSFORMERS and draw.random() < 0.15
    if pair:
        checkpoint, assistant = _gemma_pair(draw, folder, what)
    else:
        checkpoint = _checkpoint(draw, folder, what)
        kinds = ["each request's own", "draft model", "draft model"]
        kind = draw.choice([*kinds, "assistant"] if what["family"] == _PLAIN else kinds)
        what["drafter"] = kind
        if kind == "assistant":
            bits = draw.choice([None, 4, 8])
            assistant = make_assistant(checkpoint.arch, bits=bits, seed=draw.randrange(99))
        elif kind == "draft model":
            draft = _draft(draw, checkpoint, what)

    def built(*, drafts: bool) -> Target:
        options = {"threads": threads if drafts else 1, "kernel": kernel if drafts else "auto"}
        backend = make_backend(isa, **({} if isa == "reference" else options))
        return build_target(
            checkpoint.arch,
            backend,
            _loader(checkpoint),
            EngineConfig(**limits),
            assistant=assistant if drafts else None,
            draft=DraftSource(arch=draft.arch, load_weights=_loader(draft))
            if draft is not None and drafts
            else None,
        )

    target = built(drafts=True)
    makers: list[MakeDrafter] = []
    if target.head is not None:
        what["ngram"] = draw.random() < 0.4
        makers = [NGramDrafter, target.head.drafter] if what["ngram"] else [target.head.drafter]
    if isinstance(target.head, DraftModel):
        what["chunk"] = target.head.chunk = draw.choice([5, 40, 256])
    vocab = checkpoint.arch.vocab_size
    motif = [draw.randrange(vocab) for _ in range(40)]
    return World(
        what=what,
        target=target,
        control=built(drafts=False),
        makers=makers,
        source=[draw.randrange(vocab) for _ in range(300)] + motif * 4,
        limits=limits,
    )


def _checkpoint(draw: random.Random, folder: Path, what: dict[str, Any]) -> Checkpoint:
    """Draw a family and a format, in a file or in memory."""
    family, seed = draw.choice([*sorted(CONFIGS), _PLAIN]), draw.randrange(1 << 30)
    form = draw.choice(["memory", "memory", "gguf", "folder", "mlx"])
    if form == "gguf" and family not in IN_GGUF:
        form = "folder"
    what |= {"family": family, "format": form}
    if form == "memory":
        kind = draw.choice([*QUANTIZED, *QUANTIZED, *KINDS])
        what["kind"] = kind
        wide = QUANTIZED.get(kind, {}).get("numbers") in ("u8", "i8")
        arch = family_arch(family, **(_WIDE if wide else {}))
        return random_checkpoint(arch, kind=kind, seed=seed)
    weights = random_weights(family_arch(family), seed)
    if form == "gguf":
        path = write_family_gguf(folder / "model.gguf", family, weights)
        return read_checkpoint(read_gguf(path))
    if form == "mlx":
        what["bits"], what["group"] = draw.choice([4, 5, 6, 8]), draw.choice([32, 32, 64])
        # Only some widths hold groups of 64.
        others = {} if what["group"] == 32 else _dense_modules(family, what["group"])
        setting = {"bits": what["bits"], "group_size": what["group"]}
        return read_folder(write_mlx_folder(folder, family, weights, setting | others)).checkpoint
    write_folder(folder, family, weights, dtype=draw.choice(["f32", "f16"]), shards=2)
    what["quantize"] = draw.choice(["none", "q4", "q8"])
    return dataclasses.replace(read_folder(folder).checkpoint, quantize=what["quantize"])


def _dense_modules(family: str, group: int) -> dict[str, Any]:
    """Return settings that keep matrices dense whose width is no multiple of a group."""
    names = MODEL_TYPES[CONFIGS[family]["model_type"]].layer_names
    return {
        folder_name(role, names).removesuffix(".weight"): False
        for role, shape in tensor_shapes(family_arch(family)).items()
        if len(shape) == 2 and shape[1] % group
    }


def _draft(draw: random.Random, target: Checkpoint, what: dict[str, Any]) -> Checkpoint:
    """Draw a draft model: the target itself, which is right, or some other, which is not."""
    if draw.random() < 0.5:
        what["draft"] = "itself"
        return target
    family = draw.choice(sorted(CONFIGS))
    changes = draw.choice([{}, {"vocab_size": 90}, {"vocab_size": 112}])
    changes |= {"max_position_embeddings": draw.choice([96, 256])}
    what["draft"] = f"{family} {changes}"
    kind = draw.choice(sorted(KINDS))
    return random_checkpoint(
        family_arch(family, **changes), kind=kind, seed=draw.randrange(1 << 30)
    )


def _gemma_pair(
    draw: random.Random, folder: Path, what: dict[str, Any]
) -> tuple[Checkpoint, HeadCheckpoint]:
    """Draw a Gemma 4 target with its assistant, made by transformers."""
    from tests.gemma4_pair import make_pair

    shared, clustered = draw.choice([0, 2]), draw.random() < 0.5
    make_pair(folder, shared=shared, clustered=clustered, seed=draw.randrange(1 << 30))
    quantize = draw.choice(["none", "q4", "q8"])
    what |= {"family": "gemma 4 pair", "shared": shared, "clustered": clustered}
    what |= {"quantize": quantize, "drafter": "gemma assistant"}
    checkpoint = read_folder(folder / "target").checkpoint
    assistant = read_head(folder / "assistant", checkpoint.arch, "")
    return dataclasses.replace(checkpoint, quantize=quantize), assistant


def _loader(checkpoint: Checkpoint) -> Callable[[Backend], Any]:
    return lambda backend: load_decoder(checkpoint, backend)


def _runs(backend_name: str) -> bool:
    """Tell whether this machine has an instruction path."""
    try:
        CpuBackend(isa=backend_name.removeprefix("cpu-"), threads=1)
    except Exception:
        return False
    return True
