"""The sides of a benchmark, seen from the process that drives them.

A `Side` is a worker process of `slipstream.bench.peers`, spoken to in JSON lines. `Contender` is
one way to run it (threads, and llama.cpp's variant); a measurement scans a side's contenders
quickly, keeps the fastest two, times them in interleaved trials and takes the better: each side at
its best.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.bench.peers.process import PeerError, WorkerProcess

HERE = Path(__file__).resolve().parent
OURS = "slipstream"
SAME_FILE = "llama.cpp, same file"
Q4_0 = "llama.cpp, Q4_0"
SCAN_TRIALS = 3
FINALISTS = 2
FAR_BEHIND = 2.0  # times the fastest of the first rounds: never the best, whatever the noise
SETTLE_S = 0.02  # OpenMP threads spin for some milliseconds after their work


def environment() -> dict[str, str]:
    """Return the environment of child processes: this checkout's sources go first."""
    source = str(HERE.parent / "src")
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


SideError = PeerError  # a side is missing, died or answered with an error


class Side(WorkerProcess):
    """A loaded worker process.

    Args:
        python: interpreter that has what the worker imports.
        script: the worker, a file beside this one.
    """

    def __init__(self, python: str, script: str) -> None:
        super().__init__([python, str(HERE / script)], environment=environment())


def ours() -> Side:
    """Start our side in this interpreter."""
    return Side(sys.executable, "slipstream_worker.py")


def llama(python: str) -> Side:
    """Start the llama.cpp side in the interpreter that has llama-cpp-python."""
    return Side(python, "llama_worker.py")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to run one side: the process, what it is called, the arguments that select it."""

    side: Side
    label: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Trials of one side's best contender, in seconds."""

    label: str
    trials: list[float]

    @property
    def median(self) -> float:
        """The middle trial."""
        return statistics.median(self.trials)


Measure = Callable[[Contender], float]


def compete(
    field: dict[str, list[Contender]], measure: Measure, num_trials: int, failed: dict[str, str]
) -> dict[str, Timing]:
    """Time every side at its best, trials interleaved and their order reversed every other time.

    Args:
        field: contenders of each side.
        measure: runs one contender once and returns seconds.
        num_trials: trials of each finalist.
        failed: sides to leave out; one that fails here is added with what it said.
    """
    finalists: list[tuple[str, Contender]] = []
    for name, contenders in field.items():
        if name not in failed:
            with noting_failure(name, failed):
                finalists += [(name, contender) for contender in _fastest(contenders, measure)]
    trials: dict[tuple[str, str], list[float]] = {}
    for trial in range(num_trials):
        for name, contender in finalists if trial % 2 == 0 else reversed(finalists):
            if name not in failed:
                with noting_failure(name, failed):
                    seconds = _settled(contender, measure)
                    trials.setdefault((name, contender.label), []).append(seconds)
    best: dict[str, Timing] = {}
    for (name, label), times in trials.items():
        timing = Timing(label=label, trials=times)
        if name not in failed and (name not in best or timing.median < best[name].median):
            best[name] = timing
    return best


@contextmanager
def noting_failure(name: str, failed: dict[str, str]) -> Iterator[None]:
    """Turn a side's error inside the block into a row of `failed`."""
    try:
        yield
    except SideError as error:
        failed[name] = str(error)


def _fastest(contenders: Sequence[Contender], measure: Measure) -> list[Contender]:
    """Return the fastest two by a scan in interleaved order.

    Two rounds (the first may pay for warming up) drop what is far behind; the rest get
    `SCAN_TRIALS` more.
    """
    scans: dict[str, list[float]] = {contender.label: [] for contender in contenders}

    def best(contender: Contender) -> float:
        return min(scans[contender.label])

    def scan(rounds: int) -> None:
        for _ in range(rounds):
            for contender in contenders:
                scans[contender.label].append(_settled(contender, measure))

    scan(2)
    if len(contenders) <= FINALISTS:
        return list(contenders)
    limit = FAR_BEHIND * min(map(best, contenders))
    contenders = [contender for contender in contenders if best(contender) <= limit]
    if len(contenders) > FINALISTS:
        scan(SCAN_TRIALS)
    return sorted(contenders, key=best)[:FINALISTS]


def _settled(contender: Contender, measure: Measure) -> float:
    """Measure after a pause in which the threads of whoever ran before stop spinning."""
    time.sleep(SETTLE_S)
    return measure(contender)
