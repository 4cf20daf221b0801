"""Runs a program on a pseudo-terminal of its own: what a user types and what the screen gets."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 60.0  # for one expected text, on a machine that may be busy
SETTLE_S = 0.3
# Makes stdin the session's terminal, so that Ctrl-C is a signal, and one that is not ignored, as it
# is in whatever a shell starts in the background, these tests included.
TAKE_TERMINAL = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def converse(
    program: str,
    steps: Sequence[tuple[str, str]],
    *,
    term: str = "xterm-256color",
    **variables: str,
) -> tuple[str, int]:
    """Run a Python program on a terminal and talk with it.

    Args:
        program: source text.
        steps: what to wait for on the screen, counted from the last find on, and then to type.
        term: the terminal's kind.
        variables: environment variables to set.

    Returns:
        All that the screen got, and the exit code.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-c", f"{TAKE_TERMINAL}\n{program}"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**environment, "TERM": term, **variables},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        screen, seen, typed = "", 0, ""
        for expected, keys in steps:
            screen, seen = _read_until(ours, screen, seen, expected, again=typed == "\x03")
            if keys == "\x03":  # readline notices a signal only while it waits for a key
                time.sleep(SETTLE_S)
            os.write(ours, keys.encode())
            typed = keys or typed
        screen, _ = _read_until(ours, screen, seen, None)
        return screen, process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _read_until(
    terminal: int, screen: str, seen: int, expected: str | None, *, again: bool = False
) -> tuple[str, int]:
    """Read on until `expected` is on the screen, or to the program's end if None.

    With `again`, Ctrl-C is pressed once more after each second without a word: on a busy machine
    the first may fall between drawing the prompt and waiting for a key, where readline loses it.
    """
    deadline = time.monotonic() + PATIENCE_S
    while expected is None or (at := screen.find(expected, seen)) < 0:
        left = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([terminal], [], [], min(left, 1.0) if again else left)
        if again and not ready and left > 0:
            os.write(terminal, b"\x03")
            continue
        try:
            data = os.read(terminal, 4096) if ready else b""
        except OSError:  # how Linux says that the other side is closed
            data = b""
        if not data:
            if ready and expected is None:
                return screen, len(screen)
            raise AssertionError(f"no {expected!r} on the screen:\n{screen[seen:]!r}")
        screen += data.decode()  # tests print ASCII or whole characters at once
    return screen, at + len(expected)
