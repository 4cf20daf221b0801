"""Model files: open one, and everything that the engine needs of it is at hand.

`open_model` reads and validates the header, the tokenizer and the chat template (a tenth of a
second); `ModelFile.load_weights` then reads the tensors into a back end's layout. Nothing here
imports torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import LoadError
from slipstream.kernels.ops import Backend
from slipstream.models.arch import Arch
from slipstream.models.decoder import DecoderWeights
from slipstream.models.loading.arch_map import read_checkpoint
from slipstream.models.loading.checkpoint import Checkpoint
from slipstream.models.loading.gguf import GgufFile, read_gguf
from slipstream.models.loading.metadata import Metadata, read_str
from slipstream.models.loading.names import resolve_model
from slipstream.models.loading.pull import pull
from slipstream.models.loading.template import ChatTemplate
from slipstream.models.loading.tokenizer import Tokenizer
from slipstream.models.loading.weights_map import load_decoder

__all__ = ["ChatTemplate", "ModelFile", "Tokenizer", "open_model", "pull", "resolve_model"]

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14  # 1 MiB of samples: a millisecond, for any model size


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """An opened model.

    Attributes:
        path: the file.
        name: the model's own name for itself, else the file's stem.
        arch: its decoder.
        tokenizer: its tokenizer.
        template: its chat template, if it has one.
        fingerprint: 32 hex digits that tell model files apart (header, size, samples of weights).
        checkpoint: its tensors.
    """

    path: Path
    name: str
    arch: Arch
    tokenizer: Tokenizer
    template: ChatTemplate | None
    fingerprint: str
    checkpoint: Checkpoint

    def load_weights(self, backend: Backend) -> DecoderWeights:
        """Read every tensor into the back end's own layout.

        Raises:
            LoadError: the file changed since it was opened, or cannot be read.
        """
        with _naming(self.path):
            return load_decoder(self.checkpoint, backend)


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open a GGUF file and validate all of it but the tensors' values.

    Raises:
        LoadError: the file is missing, damaged or of a kind that is not supported; it is named.
    """
    path = Path(path)
    with _naming(path):
        file = read_gguf(path)
        checkpoint = read_checkpoint(file)
        arch = checkpoint.arch
        tokenizer = Tokenizer(file.metadata)
        if tokenizer.vocab_size != arch.vocab_size:
            raise LoadError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding {arch.vocab_size}"
            )
        return ModelFile(
            path=path,
            name=read_str(file.metadata, "general.name", path.stem),
            arch=arch,
            tokenizer=tokenizer,
            template=_read_template(file.metadata, tokenizer),
            fingerprint=_fingerprint(file),
            checkpoint=checkpoint,
        )


def _read_template(metadata: Metadata, tokenizer: Tokenizer) -> ChatTemplate | None:
    source = read_str(metadata, "tokenizer.chat_template", "")
    if not source:
        return None
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    tokens = {key: tokenizer.token_text(i) for key, i in ids.items() if i is not None}
    return ChatTemplate(source, tokens)


def _fingerprint(file: GgufFile) -> str:
    """Hash the header, the size and evenly spaced samples of the tensors."""
    size, _ = file.stamp
    digest = hashlib.sha256(str(size).encode())
    with file.open() as source:
        digest.update(source.read(file.data_offset))
        for index in range(_NUM_SAMPLES):
            span = max(size - file.data_offset - _SAMPLE_BYTES, 0)
            source.seek(file.data_offset + span * index // (_NUM_SAMPLES - 1))
            digest.update(source.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's path in front of a LoadError's message."""
    try:
        yield
    except LoadError as error:
        raise type(error)(f"{path}: {error.message}", hint=error.hint) from error
