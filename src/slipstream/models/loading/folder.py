"""Folders as Hugging Face has them: config.json, safetensors, a tokenizer.

The family is that of `model_type`; a model that also sees or hears has its text model's
configuration in `text_config`, and its other tensors are left alone. Whatever else the
configuration says must be known to leave the arithmetic alone: keys of no consequence are listed,
and an unknown one whose name speaks of arithmetic is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import LoadError
from slipstream.models.arch import Arch
from slipstream.models.loading.checkpoint import (
    EMBEDDING,
    NORM,
    OUTPUT,
    Checkpoint,
    Source,
    bind,
    layer_role,
)
from slipstream.models.loading.families import FAMILIES, Family
from slipstream.models.loading.keys import Keys
from slipstream.models.loading.metadata import describe
from slipstream.models.loading.mlx_source import MlxSource
from slipstream.models.loading.safetensors_files import DenseSource, SafetensorsFiles, read_files

CONFIG = "config.json"
MODEL_TYPES = {name: family for family in FAMILIES for name in family.model_types}
# In front of a text model's names, the output's name beside them.
_PLACES = (
    ("model.", "lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("", "lm_head.weight"),
)
# Parts of models that also see or hear.
_OTHER_PARTS = re.compile(r"(model\.)?(vision|audio|multi_modal|embed_vision|embed_audio)\w*\.")
_OLD_BUFFERS = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.bias|masked_bias)$")
# Words that keys of the arithmetic are made of, and keys that have one and do no harm.
_ARITHMETIC = re.compile(
    r"attn|attention|rope|rotary|norm|scale|scaling|softcap|bias|window|expert|moe|multiplier|"
    r"activation|hidden_act|head|layer|residual|kv_|logit|embed"
)
_HARMLESS = {
    "attention_dropout",
    "output_attentions",
    "output_hidden_states",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
}


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder's decoder.

    Attributes:
        config: the configuration's bytes, as they are.
        data_offsets: each file of tensors and where its header ends.
    """

    checkpoint: Checkpoint
    config: bytes
    data_offsets: Mapping[Path, int]


def read_folder(folder: Path) -> Folder:
    """Describe the decoder in a folder and check its tensors.

    Raises:
        LoadError: another family, a feature that the forward does not compute, a missing or
            unexpected tensor, or two values that contradict each other.
    """
    config = read_json(folder / CONFIG)
    family, keys = _family(config)
    arch = family.describe(keys)
    _check_rest(keys)
    files = read_files(folder)
    return Folder(
        checkpoint=bind_folder(arch, family, open_source(files, config)),
        config=(folder / CONFIG).read_bytes(),
        data_offsets={path: 8 + len(header) for path, header in files.headers.items()},
    )


def bind_folder(arch: Arch, family: Family, source: Source) -> Checkpoint:
    """Find a text model's tensors among those of a folder.

    Raises:
        LoadError: one is missing, misshapen or unexpected.
    """
    prefix, output = _place(source.shapes)
    layers = {
        f"{prefix}layers.{index}.{name}": layer_role(index, role)
        for index in range(arch.num_layers)
        for role, name in family.layer_names.items()
    }
    names = {role: name for name, role in layers.items()}
    names |= {EMBEDDING: f"{prefix}embed_tokens.weight", NORM: f"{prefix}norm.weight"}
    names[OUTPUT] = output
    return bind(
        arch,
        source,
        names,
        norm_shift=family.norm_shift,
        unused=_unused(arch, source.shapes, names, prefix),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        LoadError: it is missing, damaged, or holds something else.
    """
    try:
        block = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(block, dict):
        raise LoadError(f"{path.name} must hold an object, got {type(block).__name__}")
    return block


def _family(config: Mapping[str, Any]) -> tuple[Family, Keys]:
    """Return the family and the keys of the text model."""
    model_type = config.get("model_type")
    text = config.get("text_config")
    if text is not None:
        if not isinstance(text, dict):
            raise LoadError(f"text_config must be an object, got {describe(text)}")
        of_both = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = of_both | {"model_type": model_type} | text
        model_type = config["model_type"]
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise LoadError(
            f"model_type must be one of {', '.join(sorted(MODEL_TYPES))}, got {model_type!r}"
        )
    return MODEL_TYPES[model_type], Keys(config)


def _check_rest(keys: Keys) -> None:
    """Refuse what the family did not look at, where its name speaks of arithmetic."""
    for key in keys.unread():
        value = keys.raw(key)
        if value and key not in _HARMLESS and _ARITHMETIC.search(key):
            raise LoadError(
                f"{CONFIG}: {key} is not known to this family: it must be absent or null, "
                f"got {describe(value)}"
            )


def open_source(files: SafetensorsFiles, config: Mapping[str, Any]) -> Source:
    """Return the tensors of the format that the configuration names."""
    block = config.get("quantization") or config.get("quantization_config")
    if not block:
        return DenseSource(files)
    method = block.get("quant_method") if isinstance(block, dict) else None
    if method is not None or not isinstance(block, dict):
        raise LoadError(
            f"{CONFIG}: quantization must be MLX's, got {describe(method or block)}",
            hint="use a folder in bfloat16 with --quantize, an MLX folder or a GGUF file",
        )
    return MlxSource(files, block)


def _place(names: Collection[str]) -> tuple[str, str]:
    """Return what stands in front of the text model's names, and the output's name."""
    for prefix, output in _PLACES:
        if f"{prefix}embed_tokens.weight" in names:
            return prefix, output
    raise LoadError(
        f"tensor embed_tokens.weight is missing, with any of "
        f"{', '.join(prefix for prefix, _ in _PLACES if prefix)} in front"
    )


def _unused(
    arch: Arch, present: Collection[str], names: Mapping[str, str], prefix: str
) -> list[str]:
    """Return the tensors that a text model may do without."""
    unused = [name for name in present if _OLD_BUFFERS.fullmatch(name)]
    if prefix not in ("", "model."):
        unused += [name for name in present if _OTHER_PARTS.match(name)]
    if arch.tied_embedding:
        unused.append(names[OUTPUT])
    for index in range(arch.num_layers):
        if not arch.owns_kv(index):
            unused += [names[layer_role(index, role)] for role in ("k", "v", "k_norm")]
    return unused
