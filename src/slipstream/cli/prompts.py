"""Reading texts from flags, files or stdin, and refusing what no model should be given."""

from __future__ import annotations

import sys
from pathlib import Path

from slipstream.errors import RequestError


def read_prompt(text: str | None, file: str | None) -> str:
    """Return the prompt that a command was given, unchanged to the last newline.

    Args:
        text: value of --prompt.
        file: value of --prompt-file; "-" is stdin.

    Raises:
        RequestError: none or both were given, the file cannot be read, or the prompt is empty, not
            UTF-8 or holds a NUL.
    """
    if (text is None) == (file is None):
        got = "neither" if text is None else "both"
        raise RequestError(
            f"a prompt comes from either --prompt or --prompt-file, got {got}",
            param="prompt",
            hint='e.g. --prompt "Why is the sky blue?", or --prompt-file - to read stdin',
        )
    if text is not None:
        return check_text(text, "--prompt")
    assert file is not None
    return read_text(file)


def read_text(file: str, what: str = "prompt") -> str:
    """Return the text of a file, unchanged to the last newline.

    Args:
        file: its path; "-" is stdin.
        what: the request field that it is for.

    Raises:
        RequestError: the file cannot be read, is empty, not UTF-8 or holds a NUL.
    """
    source = "stdin" if file == "-" else file
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"cannot read the {what} from {source}: {reason}") from error
    try:
        return check_text(data.decode("utf-8"), source, what)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the {what} from {source} is not UTF-8: byte 0x{data[error.start]:02x} "
            f"at offset {error.start}",
            param=what,
            hint="convert the text to UTF-8 first",
        ) from error


def check_text(text: str, source: str, what: str = "prompt") -> str:
    """Return a text as it is.

    Args:
        source: where it comes from, for the message.
        what: the request field that it is for.

    Raises:
        RequestError: it is empty, not UTF-8 or holds a NUL.
    """
    if not text:
        raise RequestError(f"the {what} from {source} is empty", param=what)
    if "\0" in text:
        offset = text.index("\0")
        raise RequestError(
            f"the {what} from {source} holds a NUL at character {offset}",
            param=what,
            hint="is it a binary file?",
        )
    # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError(
            f"the {what} from {source} is not UTF-8",
            param=what,
            hint="convert the text to UTF-8 first",
        )
    return text
