"""A server as users start it: a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0  # on a busy machine; whoever waits longer has found a hang


class ServerProcess:
    """`slipstream serve`, and what it says on stderr."""

    def __init__(self, model: Path, *flags: str, **variables: str) -> None:
        command = [sys.executable, "-m", "slipstream.cli", "serve", str(model), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        )
        self.lines: list[str] = []
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        assert self._is_ready.wait(PATIENCE_S)
        served = [line for line in self.lines if line.startswith("serving ")]
        assert served, "".join(self.lines)
        self.url = served[0].split(" on ")[1].strip()
        self.port = int(self.url.rsplit(":", 1)[1])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("serving "):
                self._is_ready.set()
        self._is_ready.set()

    def health(self) -> dict[str, Any]:
        """Return what /health says."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=PATIENCE_S) as reply:
            return dict(json.load(reply))

    def is_idle(self) -> bool:
        """Tell whether nothing runs, waits or holds a page."""
        health = self.health()
        return health["running_or_waiting"] == health["kv_pages_used"] == 0

    def rss_bytes(self) -> int:
        """Return the memory that it has."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_threads(self) -> int:
        """Return how many threads it has."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def num_files(self) -> int:
        """Return how many files and sockets it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Return the exit code once it has ended."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def close(self) -> None:
        """End it if it still runs, and let go of its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def serving(model: Path, *flags: str, **variables: str) -> Iterator[ServerProcess]:
    """Run a server while the block runs."""
    server = ServerProcess(model, *flags, **variables)
    try:
        yield server
    finally:
        server.close()


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
