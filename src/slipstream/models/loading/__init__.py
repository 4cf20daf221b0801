"""Models on disk: open one, and everything that the engine needs of it is at hand.

`open_model` reads and validates the header, the tokenizer and the chat template (a tenth of a
second); `ModelFile.load_weights` then reads the tensors into a back end's layout. Nothing here
imports torch.
"""

from __future__ import annotations

import dataclasses
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
from slipstream.models.loading.fingerprint import fingerprint_of
from slipstream.models.loading.folder import read_folder
from slipstream.models.loading.folder_template import read_folder_template
from slipstream.models.loading.gguf import read_gguf
from slipstream.models.loading.gguf_tokenizer import read_tokenizer
from slipstream.models.loading.hub import title_of
from slipstream.models.loading.json_tokenizer import read_json_tokenizer
from slipstream.models.loading.metadata import Metadata, read_str
from slipstream.models.loading.names import resolve_model
from slipstream.models.loading.pull import pull
from slipstream.models.loading.template import ChatTemplate
from slipstream.models.loading.tokenizer import Tokenizer
from slipstream.models.loading.weights_map import load_decoder

__all__ = ["ChatTemplate", "ModelFile", "Tokenizer", "open_model", "pull", "resolve_model"]


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """An opened model.

    Attributes:
        path: the file or folder.
        name: the model's own name for itself, else that of the file or folder.
        tokenizer: its tokenizer.
        template: its chat template, if it has one.
        fingerprint: 32 hex digits that tell models apart (headers, sizes, samples of weights), and
            what they are rounded to.
        checkpoint: its decoder and tensors.
    """

    path: Path
    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    fingerprint: str
    checkpoint: Checkpoint

    @property
    def arch(self) -> Arch:
        """Its decoder."""
        return self.checkpoint.arch

    def load_weights(self, backend: Backend) -> DecoderWeights:
        """Read every tensor into the back end's own layout.

        Raises:
            LoadError: the file changed since it was opened, or cannot be read.
        """
        with _naming(self.path):
            return load_decoder(self.checkpoint, backend)


def open_model(path: str | os.PathLike[str], *, quantize: str = "none") -> ModelFile:
    """Open a GGUF file or a folder and validate all of it but the tensors' values.

    Args:
        path: a GGUF file, or a folder with config.json, safetensors and tokenizer.json.
        quantize: what dense matrices are rounded to: "none", "q4" or "q8".

    Raises:
        LoadError: it is missing, damaged or of a kind that is not supported; it is named.
    """
    path = Path(path)
    with _naming(path):
        file = _open_folder(path) if path.is_dir() else _open_gguf(path)
    if quantize == "none":
        return file
    checkpoint = dataclasses.replace(file.checkpoint, quantize=quantize)
    fingerprint = fingerprint_of({}, file.fingerprint.encode(), quantize.encode())
    return dataclasses.replace(file, checkpoint=checkpoint, fingerprint=fingerprint)


def _open_gguf(path: Path) -> ModelFile:
    file = read_gguf(path)
    checkpoint = read_checkpoint(file)
    tokenizer = read_tokenizer(file.metadata)
    if tokenizer.vocab_size != checkpoint.arch.vocab_size:
        raise LoadError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding "
            f"{checkpoint.arch.vocab_size}"
        )
    return ModelFile(
        path=path,
        name=read_str(file.metadata, "general.name", path.stem),
        tokenizer=tokenizer,
        template=_read_template(file.metadata, tokenizer),
        fingerprint=fingerprint_of({path: file.data_offset}),
        checkpoint=checkpoint,
    )


def _open_folder(path: Path) -> ModelFile:
    folder = read_folder(path)
    tokenizer = read_json_tokenizer(path, folder.checkpoint.arch.vocab_size)
    return ModelFile(
        path=path,
        name=title_of(path),
        tokenizer=tokenizer,
        template=read_folder_template(path, _end_tokens(tokenizer)),
        fingerprint=fingerprint_of(folder.data_offsets, folder.config),
        checkpoint=folder.checkpoint,
    )


def _read_template(metadata: Metadata, tokenizer: Tokenizer) -> ChatTemplate | None:
    source = read_str(metadata, "tokenizer.chat_template", "")
    return ChatTemplate(source, _end_tokens(tokenizer)) if source else None


def _end_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the tokens that templates know by name."""
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {key: tokenizer.token_text(i) for key, i in ids.items() if i is not None}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's path in front of a LoadError's message.

    What the file calls its tensors and tokens may be in it, so nothing but printable text is.
    """
    try:
        yield
    except LoadError as error:
        message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in error.message)
        raise type(error)(f"{path}: {message}", hint=error.hint) from error
