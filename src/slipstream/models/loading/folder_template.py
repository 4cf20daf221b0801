"""The chat template of a Hugging Face folder: a file of its own, or a key of the tokenizer's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import LoadError
from slipstream.models.loading.folder import read_json
from slipstream.models.loading.metadata import describe
from slipstream.models.loading.template import ChatTemplate

TEMPLATE_FILE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
_KEY = "chat_template"


def read_folder_template(folder: Path, tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Return the folder's template, None where it has none.

    Args:
        tokens: texts of "bos_token" and "eos_token" where the folder does not name them.

    Raises:
        LoadError: a file is damaged, or the template does not compile.
    """
    path = folder / TOKENIZER_CONFIG
    config = read_json(path) if path.is_file() else {}
    source = _read_source(folder, config)
    return None if source is None else ChatTemplate(source, {**tokens, **_named_tokens(config)})


def _read_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise LoadError(f"{TEMPLATE_FILE} cannot be read: {error}") from error
    source = config.get(_KEY)
    if isinstance(source, list):  # several by name: the one for conversations
        named = {item.get("name"): item.get("template") for item in source if type(item) is dict}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise LoadError(f"{TOKENIZER_CONFIG}: {_KEY} must be a text, got {describe(source)}")
    return source or None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of "bos_token" and the like, which templates may use."""
    tokens = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens
