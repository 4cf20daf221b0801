"""The calling end of the protocol: a worker process, started, asked and ended.

Whatever the worker does, the caller gets an answer or a `PeerError` in bounded time: a worker that
dies, prints something else or misses its deadline is ended by its process id, and the last line of
its standard error is quoted. That stream goes to an unnamed file, so no thread has to drain it
while others are being measured.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START_S = 600.0  # a first import of a large library from a cold disk
LOAD_S = 1800.0  # a requantisation of the largest models that fit one machine
CLOSE_S = 5.0  # a worker at rest ends at once when its input closes
_TAIL_BYTES = 4096
_ENDED = "the worker ended"
_PACKAGE = Path(__file__).resolve().parents[2]
# Our package alone is taken from beside this file. Its folder does not stay on the path: in an
# installation everything else of this interpreter lies there, which may be none of that one's.
_RUN_MODULE = (
    "import runpy, sys; folder, module = sys.argv[1:]; sys.path.insert(0, folder); "
    "import slipstream; sys.path.remove(folder); runpy.run_module(module, run_name='__main__')"
)


class PeerError(Exception):
    """A peer is missing, died or answered with an error; the text says which."""


class MissingModuleError(PeerError):
    """The worker's interpreter lacks a module that the engine needs."""


def module_command(python: str, module: str) -> list[str]:
    """Return the command that runs a module of this package in another interpreter."""
    return [python, "-c", _RUN_MODULE, str(_PACKAGE.parent), module]


class WorkerProcess:
    """A worker that has announced itself, asleep until it is asked.

    Args:
        command: starts a program that calls `worker.serve`.
        environment: variables for it, instead of this process's own.
        deadline_s: seconds until it must have announced itself.

    Attributes:
        facts: what it announced.

    Raises:
        PeerError: it could not be started, or did not announce itself.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = START_S,
    ) -> None:
        self._python = command[0]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._received = b""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=environment,
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{self._python} does not run: {error.strerror}") from error
        try:
            self.facts = self._answer(time.perf_counter(), deadline_s)
        except BaseException:  # an interrupt too must not leave it running
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it may still be asked: not closed, and not ended for a failure."""
        assert self._process.stdin is not None
        return not self._process.stdin.closed

    def ask(self, do: str, *, deadline_s: float = LOAD_S, **arguments: Any) -> dict[str, Any]:
        """Have the worker run a method and return its answer.

        `elapsed` in the answer is this process's own clock, from before the request to after the
        answer, and `first_s` in it the time of the first line that the method emitted.

        Raises:
            PeerError: the method raised, the deadline passed or the worker is gone.
        """
        assert self._process.stdin is not None
        if not self.is_open:
            raise PeerError("the worker is gone")
        request = json.dumps({"do": do, **arguments}).encode() + b"\n"
        start = time.perf_counter()
        try:
            self._process.stdin.write(request)
        except BrokenPipeError as error:
            raise self._end(_ENDED) from error
        answer = self._answer(start, deadline_s)
        answer["elapsed"] = time.perf_counter() - start
        return answer

    def close(self) -> None:
        """End the worker; a second call does nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._stop(grace_s=CLOSE_S)
        self._process.stdout.close()
        self._errors.close()

    def _answer(self, start: float, deadline_s: float) -> dict[str, Any]:
        first_s: float | None = None
        while True:
            line = self._read_line(start + deadline_s)
            if line is None:
                raise self._end(f"no answer within {deadline_s:g} s")
            if not line:
                raise self._end(_ENDED)
            try:
                answer = json.loads(line)
            except ValueError:
                answer = None
            if not isinstance(answer, dict):
                raise self._end(f"the worker printed {line[:80]!r} instead of an answer")
            if "event" not in answer:
                break
            if first_s is None:
                first_s = time.perf_counter() - start
        if "missing" in answer:
            raise MissingModuleError(f"{self._python} has no module {answer['missing']}")
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer if first_s is None else {**answer, "first_s": first_s}

    def _read_line(self, until: float) -> bytes | None:
        """Return the next line, what is left of it at the end of the stream, or None if late."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, until - time.perf_counter())):
                    return None
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    rest, self._received = self._received, b""
                    return rest
                self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line + b"\n"

    def _end(self, what: str) -> PeerError:
        """End a worker that cannot go on; return what happened with its last words."""
        self._stop(grace_s=1.0 if what == _ENDED else 0.0)
        code = f", exit code {self._process.returncode}" if what == _ENDED else ""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = self._errors.read().decode(errors="replace").split("\n")
        words = next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
        self.close()
        return PeerError(f"{what}{code}{words}")

    def _stop(self, grace_s: float) -> None:
        """Wait for the process to end of itself, then kill it."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
