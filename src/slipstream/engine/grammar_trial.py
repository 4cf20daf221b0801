"""Compiles grammars on trial, in a process that may be ended: `python -m` this module is it.

The compiler is native code that nothing can interrupt, and a schema of some hundred bytes can keep
it for hours and fill the memory: what it says about an intersection of patterns, for one, doubles
with every pattern. So a stranger's grammar is compiled here first, where the system itself ends
what takes more than `MAX_CPU_S` or `MAX_GROWTH_BYTES`. The engine's process compiles only what came
through, and knows what that takes.

Over the pipes: first a pickled `Words`, behind its length in four bytes; then a line of JSON for
each grammar, and one for each answer, which has `cpu_s` or the `message` of a refusal. Processor
time is what counts, so that a busy machine refuses nothing that an idle one would take. It runs at
a low priority: requests that decode go first.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.engine.grammar import Grammars, Vocabulary
from slipstream.errors import RequestError
from slipstream.types import Grammar

# Ordinary schemas take 1 to 3 ms, ones of 10,000 lines up to half a second.
MAX_CPU_S = 1.0
MAX_GROWTH_BYTES = 1 << 30  # address space, most of which is never touched
NICE = 10


@dataclass(frozen=True, kw_only=True)
class Words:
    """A vocabulary that can be sent; what it encodes is of no account to a trial.

    Attributes:
        row_size: length of a row of logits.
    """

    vocab_size: int
    row_size: int
    stop_ids: frozenset[int]
    control_ids: frozenset[int]
    spelled: Sequence[bytes]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        return self.spelled[token_id]

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return nothing: only what is forced would be encoded, and nobody asks."""
        return []


def packed(vocabulary: Vocabulary, row_size: int) -> bytes:
    """Return what the process is told first."""
    words = Words(
        vocab_size=vocabulary.vocab_size,
        row_size=row_size,
        stop_ids=frozenset(vocabulary.stop_ids),
        control_ids=frozenset(vocabulary.control_ids),
        spelled=[vocabulary.token_bytes(token_id) for token_id in range(vocabulary.vocab_size)],
    )
    raw = pickle.dumps(words)
    return len(raw).to_bytes(4) + raw


def request_line(grammar: Grammar) -> bytes:
    """Return a grammar as the process reads it."""
    return json.dumps([grammar.kind, grammar.definition]).encode() + b"\n"


def tried(grammars: Grammars, words: Words, grammar: Grammar) -> dict[str, Any]:
    """Compile a grammar and return what is answered."""
    began = time.thread_time()
    try:
        grammars.matcher(grammar, words.stop_ids)
    except RequestError as error:
        return {"message": error.message, "code": error.code, "hint": error.hint}
    return {"cpu_s": time.thread_time() - began}


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer grammars until there are no more."""
    os.nice(NICE)
    words: Words = pickle.loads(source.read(int.from_bytes(source.read(4))))  # our parent's own
    grammars = Grammars(words, words.row_size)
    tried(grammars, words, Grammar(kind="json_object"))  # what is done once
    _limit_memory()
    sink.write(b"{}\n")
    sink.flush()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    for line in source:
        kind, definition = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        answer = tried(grammars, words, Grammar(kind=kind, definition=definition))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sink.write(json.dumps(answer).encode() + b"\n")
        sink.flush()


def _limit_memory() -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # a system without it has the limit of time alone
        return
    most = pages * resource.getpagesize() + MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
