"""The worker's end of the protocol: a process that obeys one JSON line at a time.

Engines that compete for the same cores are timed in turn, so each lives in a process of its own
that stays loaded and sleeps on its standard input while the others run. A request is a JSON object
whose `do` names a method; the answer is one JSON line: the method's dict, or `{"error": ...}`. In
between a method may emit lines of its own: `first_token` is the one that `reply` owes, so that the
clock of the calling process sees the first token arrive.

Libraries that print are kept off the protocol: the true standard output is set aside first and file
descriptor 1 then leads to standard error. Standard library only, so that every interpreter can
import it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Emit = Callable[[dict[str, Any]], None]
FIRST_TOKEN = {"event": "first_token"}


def serve(build: Callable[[Emit], Any]) -> None:
    """Build the worker, announce it with a line, then obey lines until standard input closes.

    Args:
        build: imports what the worker needs and returns an object whose public methods take keyword
            arguments and return a dict; `describe()` is sent first. It is given the function that
            sends a line before the answer.
    """
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=protocol, flush=True)

    try:
        worker = build(emit)
        answer = worker.describe()
    except Exception as error:
        emit(_failure(error))
        return
    emit(answer)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            answer = _failure(error)
        emit(answer)


def cut_at_stop(token_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """Return a reply's ids up to its first stop token, that one included, or `max_tokens`.

    What speculation generates at once may reach beyond either.
    """
    stops = frozenset(stop_ids)
    kept = token_ids[:max_tokens]
    end = next((i + 1 for i, token in enumerate(kept) if token in stops), len(kept))
    return [int(token) for token in kept[:end]]


def memory() -> dict[str, int]:
    """Return this process's resident bytes now and at its peak."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss_bytes": int(fields["VmRSS"].split()[0]) * 1024,
        "peak_bytes": int(fields["VmHWM"].split()[0]) * 1024,
    }


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _failure(error: Exception) -> dict[str, Any]:
    answer: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
    if isinstance(error, ModuleNotFoundError):
        answer["missing"] = error.name
    return answer
