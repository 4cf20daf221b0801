"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import LoadError
from slipstream.models.loading.tokenizer import Tokenizer


def read_json_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json.

    Raises:
        LoadError: always, as yet.
    """
    raise LoadError("tokenizer.json is not read yet", hint="use a GGUF file of the model")
