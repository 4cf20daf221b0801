"""One side of a benchmark as a process that obeys one JSON line at a time.

Sides that compete for two cores are timed in turn, so each lives in a process of its own that stays
loaded and sleeps on its standard input while the others run. A request is a JSON object whose
`do` names a method; the answer is one JSON line: the method's dict, or `{"error": ...}`.

Libraries that print are kept off the protocol: the true standard output is set aside first and file
descriptor 1 then leads to standard error. Standard library only, so that every interpreter can
import it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve(build: Callable[[], Any]) -> None:
    """Build the side, announce it with a line, then obey lines until standard input closes.

    Args:
        build: imports what the side needs and returns an object whose public methods take keyword
            arguments and return a dict; `describe()` is sent first.
    """
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        side = build()
        answer = side.describe()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=protocol)
        return
    print(json.dumps(answer), file=protocol)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(side, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=protocol)


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
