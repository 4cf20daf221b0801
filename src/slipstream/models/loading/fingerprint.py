"""What tells models apart without reading them: headers, sizes and samples of the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import LoadError

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14  # 1 MiB of samples: a millisecond, for any size of file


def fingerprint_of(files: Mapping[Path, int], *texts: bytes) -> str:
    """Return 32 hex digits.

    Args:
        files: each file and where its header ends; evenly spaced samples are taken of the rest.
        texts: what else counts.

    Raises:
        LoadError: a file is gone or cannot be read.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    for path, start in files.items():
        try:
            size = path.stat().st_size
            with path.open("rb") as source:
                digest.update(str(size).encode())
                digest.update(source.read(start))
                span = max(size - start - _SAMPLE_BYTES, 0)
                for index in range(_NUM_SAMPLES):
                    source.seek(start + span * index // (_NUM_SAMPLES - 1))
                    digest.update(source.read(_SAMPLE_BYTES))
        except OSError as error:
            raise LoadError(f"{path.name} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:32]
