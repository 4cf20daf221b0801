"""What a user says: typed at a terminal, or one turn a line from a pipe.

At a terminal the line is edited with readline. A paste of several lines is one turn: terminals
bracket what is pasted, and readline then takes its newlines as text. Where the editor cannot do
that (libedit, or none), lines that are already waiting behind one that was entered belong to it.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Iterator

from slipstream.cli.prompts import check_text
from slipstream.cli.view import Ink
from slipstream.errors import RequestError

_PROMPT = "> "
# A paste arrives at once, a typist's next line does not: far above one, far below the other.
_PASTE_GAP_S = 0.03


def piped_turns() -> Iterator[str]:
    """Yield stdin's lines without their ends, blank ones left out.

    Raises:
        RequestError: a line is not UTF-8 or holds a NUL.
    """
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise RequestError(
                f"line {number} of stdin is not UTF-8", hint="convert the text to UTF-8 first"
            ) from None
        if text.strip():
            yield check_text(text, f"line {number} of stdin")


class TypedTurns:
    """Asks for turns at a terminal."""

    def __init__(self) -> None:
        self._joins_waiting = not _brackets_pastes()
        self._edited = sys.stdout.isatty()
        ink = Ink.of(sys.stdout if self._edited else sys.stderr)
        marks = ("\x01", "\x02") if self._edited and ink.off else ("", "")  # no width, to readline
        begin, end = marks
        self._prompt = f"{begin}{ink.bold}{end}{_PROMPT}{begin}{ink.off}{end}"

    def ask(self) -> str:
        """Return the next turn, perhaps blank.

        Raises:
            EOFError: the user is done.
            KeyboardInterrupt: the user gave this turn up.
            RequestError: it is not UTF-8 or holds a NUL.
        """
        lines = [self._line(self._prompt)]
        while self._joins_waiting and _is_waiting():
            try:
                lines.append(self._line(""))
            except EOFError:
                break
        text = "\n".join(lines)
        return check_text(text, "the terminal") if text else ""

    def _line(self, prompt: str) -> str:
        if self._edited:
            return input(prompt)
        sys.stderr.write(prompt)  # stdout goes elsewhere and holds replies only
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


def _brackets_pastes() -> bool:
    """Set readline up, and say whether it takes a paste as one line."""
    try:
        import readline
    except ImportError:
        return False
    if "libedit" in (readline.__doc__ or "") or not sys.stdout.isatty():
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    return True


def _is_waiting() -> bool:
    return bool(select.select([sys.stdin], [], [], _PASTE_GAP_S)[0])
