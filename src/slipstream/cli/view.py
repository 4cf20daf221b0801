"""A reply as it is made, in a pipe or on a screen.

In a pipe the text passes byte for byte. On a terminal accepted draft tokens are marked, and a
control character of the model's is shown as its picture ("␛"), so that no reply can move the
cursor, set a title or answer for the user. Nothing in a reply is taken for markup, and wrapping is
left to the terminal, so that what is copied from it is what was said.

A round's text need not be its tokens' text: half a character, or what may become a stop string, is
held back. So tokens are spelled one by one here, ahead of the text, and the text that arrives takes
the marks of the spelled characters that it consists of.
"""

from __future__ import annotations

import io
import os
import shutil
import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TextIO

from slipstream.types import Chunk, Reply

# Control characters but newline and tab become pictures; C1 controls have none.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

_ENDS = {"length": " (limit reached)", "cancelled": " (stopped)"}


class Detokenizer(Protocol):
    """Turns ids into text as they come."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became final."""

    def finish(self) -> str:
        """Return what was held back."""


class Tokenizer(Protocol):
    """What a view asks of a model's tokenizer."""

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one reply."""


class Speaker(Protocol):
    """What a view asks of an engine."""

    @property
    def tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True, kw_only=True)
class Ink:
    """Escape sequences of one stream, all empty where it takes none."""

    accepted: str = ""
    faint: str = ""
    bold: str = ""
    off: str = ""

    @classmethod
    def of(cls, stream: TextIO) -> Ink:
        """Return what a stream takes; NO_COLOR (no-color.org) turns the colour into a line."""
        if not stream.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
            return cls()
        accepted = "\x1b[4m" if os.environ.get("NO_COLOR") else "\x1b[32m"
        return cls(accepted=accepted, faint="\x1b[2m", bold="\x1b[1m", off="\x1b[0m")

    def legend(self) -> str:
        """Return a line that says what the mark means."""
        return f"{self.accepted}like this{self.off}: drafted, and accepted by the model"


class Marks:
    """Says of each character of a growing text whether an accepted draft token spelled it."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._ahead: deque[tuple[str, bool]] = deque()  # spelled, not yet in the text

    def split(self, chunk: Chunk) -> list[tuple[str, bool]]:
        """Return the chunk's text as runs of (text, whether it was drafted)."""
        for index, token_id in enumerate(chunk.token_ids):
            self._ahead.append((self._detokenizer.push([token_id]), index < chunk.accepted))
        if chunk.reply is not None:
            self._ahead.append((self._detokenizer.finish(), False))
        by_mark = groupby(self._take(chunk.text), key=lambda run: run[1])
        return [("".join(text for text, _ in runs), mark) for mark, runs in by_mark]

    def _take(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the text piece by piece; what was not spelled so is not marked."""
        while text and self._ahead:
            piece, mark = self._ahead.popleft()
            if not text.startswith(piece[: len(text)]):
                self._ahead.clear()
                break
            if len(piece) > len(text):
                self._ahead.appendleft((piece[len(text) :], mark))
            yield text[: len(piece)], mark
            text = text[len(piece) :]
        if text:
            yield text, False


class ReplyView:
    """Writes one reply to a stream.

    Attributes:
        any_marked: whether accepted draft tokens were marked.
    """

    def __init__(self, out: TextIO, engine: Speaker) -> None:
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(encoding="utf-8", newline="")
        self._out = out
        self._ink = Ink.of(out)
        self._marks = Marks(engine.tokenizer.detokenizer()) if out.isatty() else None
        self._last = "\n"
        self.any_marked = False

    def show(self, chunk: Chunk) -> None:
        """Write what a round adds."""
        self._last = chunk.text[-1:] or self._last
        if self._marks is None:
            self._write(chunk.text)
        else:
            self._write("".join(self._painted(*run) for run in self._marks.split(chunk)))

    def end_line(self) -> None:
        """Go to the beginning of a line, if the text did not."""
        if self._last != "\n":
            self._write("\n")
            self._last = "\n"

    def _painted(self, text: str, drafted: bool) -> str:
        text = harmless(text)
        if not (drafted and self._ink.accepted):
            return text
        self.any_marked = True
        return f"{self._ink.accepted}{text}{self._ink.off}"

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def harmless(text: str) -> str:
    """Return a text that only prints: control characters but newline and tab as pictures."""
    return text.translate(_PICTURES)


def gain(reply: Reply) -> float | None:
    """Return how many times faster a reply came than by its own classic steps alone.

    None where it had fewer than three, or nothing was drafted.
    """
    report, decode_s = reply.speculation, reply.timing.decode_s
    if not report.rounds or report.classic_rounds < 3 or not report.classic_ms or not decode_s:
        return None
    return (reply.usage.completion_tokens - 1) * report.classic_ms / 1e3 / decode_s


def closing_line(reply: Reply, *, seed_matters: bool = False) -> str:
    """Say in one line how fast a reply was and what speculation had to do with it.

    Args:
        seed_matters: the seed was drawn and is what it takes to get the reply again.
    """
    report, count = reply.speculation, reply.usage.completion_tokens
    parts = [
        f"{count} token{'s' * (count != 1)}{_ENDS.get(reply.finish_reason, '')}",
        f"{reply.timing.decode_tokens_per_s:.1f} tok/s",
    ]
    if (gained := gain(reply)) is not None:
        parts.append(f"{gained:.2f}x its classic steps")
    if seed_matters:
        parts.append(f"seed {reply.seed}")
    if report.acceptance_length is not None:
        parts.append(f"acceptance length {report.acceptance_length:.2f}")
    why = next(iter(report.undrafted), None)
    most = f" ({report.undrafted[why]} {why.replace('_', ' ')})" if why and report.rounds else ""
    parts.append(f"rounds: {report.rounds} speculative and {report.classic_rounds} classic{most}")
    named = report.reason.startswith(report.verdict)
    return f"{', '.join(parts)}; {'' if named else report.verdict + ': '}{report.reason}"


def print_faint(text: str, stream: TextIO) -> None:
    """Print lines about a reply, not of it; on a terminal they break between words."""
    ink = Ink.of(stream)
    if stream.isatty():
        columns = shutil.get_terminal_size().columns
        wrapped = (
            textwrap.wrap(line, columns, subsequent_indent="  ") for line in text.split("\n")
        )
        text = "\n".join("\n".join(lines) for lines in wrapped)
    print(f"{ink.faint}{text}{ink.off}", file=stream, flush=True)
