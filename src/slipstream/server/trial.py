"""The process that grammars are tried in before the engine's own compiles them.

`engine.grammar_trial` is what runs there, and says why. It is started with the first grammar, and
again after one that it did not live through. What came through is remembered, so an application
that sends one schema with every request waits for its trial once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import Any

from slipstream.engine.grammar import Vocabulary
from slipstream.engine.grammar_trial import MAX_CPU_S, packed, request_line
from slipstream.errors import RequestError, SlipstreamError
from slipstream.types import Grammar

COMMAND = (sys.executable, "-m", "slipstream.engine.grammar_trial")
MAX_KNOWN = 1024  # grammars that are remembered, some 100 bytes each


class Trial:
    """Says what grammars take to compile. One thread asks; any may give up or close.

    Args:
        vocabulary: the model's tokenizer.
        row_size: length of a row of logits.
    """

    def __init__(self, vocabulary: Vocabulary, row_size: int) -> None:
        self._vocabulary = vocabulary
        self._row_size = row_size
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._who: object = None  # whose grammar is being tried
        self._is_closed = False

    def cpu_s(self, grammar: Grammar, who: object) -> float:
        """Return the processor time that compiling a grammar for one reply takes.

        Args:
            who: by which `give_up` knows it.

        Raises:
            RequestError: it is refused, takes more time or memory than it may, or was given up.
            SlipstreamError: no process can be started.
        """
        if not isinstance(grammar.definition, str) or not self._vocabulary.stop_ids:
            return 0.0  # refused where the request is checked, before anything is compiled
        line = request_line(grammar)
        key = hashlib.sha256(line).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        self._known[key] = cost_s = self._tried(line, who)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return cost_s

    def give_up(self, who: object) -> None:
        """End a trial that nobody waits for any more, with its process."""
        with self._lock:
            if self._who is who and self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End the process, and a trial with it. May be repeated."""
        with self._lock:
            self._is_closed = True
            if self._process is None:
                return
            self._process.kill()
            if self._who is None:  # else whoever reads from it lets go of it
                self._end()

    def _tried(self, line: bytes, who: object) -> float:
        words = packed(self._vocabulary, self._row_size) if self._process is None else b""
        with self._lock:
            if self._is_closed:
                raise SlipstreamError("the server is stopping")
            self._who = who
            if self._process is None:
                self._process = subprocess.Popen(
                    COMMAND,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the server alone
                )
            process = self._process
        raw = b""
        try:
            if words and not _answer(process, words):
                raise SlipstreamError("the process that tries grammars could not be started")
            raw = _answer(process, line)
        finally:
            with self._lock:
                self._who = None
                if not raw or self._is_closed:
                    self._end()
        if not raw:
            raise RequestError(
                f"grammar must be one that compiles within {MAX_CPU_S:g} s of processor time and "
                "1 GiB of memory, got one that takes more",
                param="grammar",
                code="grammar_too_expensive",
                hint="combine fewer patterns, or name fewer properties",
            )
        answer: dict[str, Any] = json.loads(raw)
        if "message" in answer:
            raise RequestError(
                answer["message"], param="grammar", code=answer["code"], hint=answer["hint"]
            )
        return float(answer["cpu_s"])

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what it was to be told
                pipe.close()
        process.wait()


def _answer(process: subprocess.Popen[bytes], what: bytes) -> bytes:
    """Return the line that answers, nothing if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(what)
        process.stdin.flush()
        return process.stdout.readline()
    except OSError:
        return b""
