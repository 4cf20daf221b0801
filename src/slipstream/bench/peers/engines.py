"""How each engine is started as peers: its workers, the files they load, the settings they try."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.bench.peers.peer import Options, Peer
from slipstream.bench.peers.process import (
    MissingModuleError,
    PeerError,
    WorkerProcess,
    module_command,
)

LOOKUP_WIDTHS = (2, 10)  # 10 is the default of llama.cpp's and transformers' lookup; 2 costs less
DTYPES = ("float32", "bfloat16")
LLAMA = "llama.cpp"
SAME_FILE = f"{LLAMA} same file"
Q4_0 = f"{LLAMA} Q4_0"
_PACKAGES = {
    "llama_worker": "llama-cpp-python",
    "transformers_worker": "transformers torch gguf accelerate",
    "openvino_worker": "openvino-genai",
}
_UNWANTED_FACTS = ("rss_bytes", "peak_bytes", "elapsed", "is_q4_0")


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What to open: the model file, the interpreter that has the engine, whom to tell."""

    model: Path
    python: str
    progress: Callable[[str], None]

    def start(self, module: str) -> WorkerProcess:
        """Start a worker module of this package. Nothing that it imports may use the network."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = module_command(self.python, f"slipstream.bench.peers.{module}")
        try:
            return WorkerProcess(command, environment=environment)
        except MissingModuleError as error:
            raise PeerError(f"{error}; hint: pip install {_PACKAGES[module]}") from error


def open_llama(opening: Opening, missing: dict[str, str]) -> Iterator[Peer]:
    """Yield llama.cpp on the same file and on its own Q4_0 requantisation, which it repacks."""
    opening.progress(f"starting {LLAMA}")
    process = opening.start("llama_worker")
    with _closed_on_failure(process):
        loaded = process.ask("load", path=str(opening.model))
    is_q4_0 = loaded["is_q4_0"]
    facts = {**loaded, "file": opening.model.name}
    yield from _peers(Q4_0 if is_q4_0 else SAME_FILE, process, facts, _llama_settings())
    if is_q4_0:
        return
    try:
        process, facts = _requantised(opening)
    except PeerError as error:
        missing[Q4_0] = str(error)
        return
    yield from _peers(Q4_0, process, facts, _llama_settings())


def open_transformers(opening: Opening, missing: dict[str, str]) -> Iterator[Peer]:
    """Yield transformers on the file as it dequantises it."""
    settings = [{"threads": t, "dtype": dtype} for t in thread_counts() for dtype in DTYPES]
    yield from _open_simple("transformers", "transformers_worker", settings, opening)


def open_openvino(opening: Opening, missing: dict[str, str]) -> Iterator[Peer]:
    """Yield OpenVINO GenAI on the file."""
    settings = [{"threads": threads} for threads in thread_counts()]
    yield from _open_simple("openvino", "openvino_worker", settings, opening)


def thread_counts() -> list[int]:
    """Return the thread counts to try: all cores that this process may use, fractions, one."""
    cores = len(os.sched_getaffinity(0))
    return sorted({cores, max(1, cores // 2), max(1, cores // 4), 1}, reverse=True)


def _open_simple(
    name: str, module: str, settings: list[Options], opening: Opening
) -> Iterator[Peer]:
    opening.progress(f"starting {name}")
    process = opening.start(module)
    with _closed_on_failure(process):
        loaded = process.ask("load", path=str(opening.model))
    yield from _peers(name, process, {**loaded, "file": opening.model.name}, settings)


def _requantised(opening: Opening) -> tuple[WorkerProcess, dict[str, Any]]:
    """Have llama.cpp write its Q4_0 file, load it, and remove its name: the mapping stays."""
    opening.progress(f"requantising to Q4_0 with {LLAMA}")
    process = opening.start("llama_worker")
    with (
        _closed_on_failure(process),
        tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder,
    ):
        target = Path(folder) / "q4_0.gguf"
        threads = max(thread_counts())
        process.ask("quantize", source=str(opening.model), target=str(target), threads=threads)
        facts = process.ask("load", path=str(target))
        facts["file"] = f"{opening.model.name}, requantised to Q4_0 by {LLAMA}"
        facts["file_bytes"] = target.stat().st_size
    return process, facts


def _llama_settings() -> list[Options]:
    return [{"threads": threads, "flash": flash} for threads in thread_counts() for flash in (1, 0)]


def _peers(
    name: str, process: WorkerProcess, facts: dict[str, Any], settings: list[Options]
) -> Iterable[Peer]:
    """Return the two peers of a loaded worker: plain, and with the engine's prompt lookup."""
    kept = {k: v for k, v in {**process.facts, **facts}.items() if k not in _UNWANTED_FACTS}
    wide = [{**options, "lookup": width} for options in settings for width in LOOKUP_WIDTHS]
    sharing: list[Peer] = []
    return [
        Peer(name, process, settings, kept, sharing),
        Peer(f"{name}, prompt lookup", process, wide, kept, sharing),
    ]


@contextmanager
def _closed_on_failure(process: WorkerProcess) -> Iterator[None]:
    try:
        yield
    except BaseException:
        process.close()
        raise
