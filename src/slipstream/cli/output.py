"""Files that a command writes: checked before anything runs, so that no result is lost to them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from slipstream.errors import ConfigError, SlipstreamError


def check_writable(path: Path) -> None:
    """Fail before anything runs, and before anything is lost, if a file cannot be written.

    Raises:
        ConfigError: it cannot.
    """
    try:
        if path.exists():
            path.open("a", encoding="utf-8").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        SlipstreamError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SlipstreamError(f"cannot write {path}: {error.strerror}") from error
