"""A compiled step: one CUDA graph for each bucket of rows, replayed without Python.

The first forward of a bucket is launched kernel by kernel, so that whatever is compiled or set up
on first use is there; then the same launches are captured. Rows are padded up to their bucket:
every count up to sixteen has its own, as verifies have. Logit rows are either all of the bucket's
or few, in buckets of their own.

One step synchronises once: inputs go up in one copy, argmax comes back to pinned memory, logits
stay on the device until somebody reads them.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

import torch

from slipstream.kernels.cuda.inputs import Inputs
from slipstream.kernels.cuda.sampling import DeviceSampler
from slipstream.kernels.ops import F32, Int32, Picks, Rows, StepResult

# Launches a kernel for (rows of the forward, rows whose logits are wanted), each a bucket.
Launch = Callable[[int, int], None]

# The same as the policy's: its costs are those of buckets.
ROW_BUCKETS = (*range(1, 17), 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
# Where not every row wants logits: ends of prompts, or rounds beside a chunk of one.
LOGIT_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class DeviceResult(StepResult):
    """A step's result whose logits are fetched when they are first read."""

    def __init__(self, argmax: Int32, fetch: Callable[[], F32], *, run: int) -> None:
        object.__setattr__(self, "argmax", argmax)
        object.__setattr__(self, "run", run)
        object.__setattr__(self, "_fetch", fetch)

    @cached_property
    def logits(self) -> F32:
        """Float32 of shape (L, V); gone with the next step."""
        fetch: Callable[[], F32] = self.__dict__["_fetch"]
        return fetch()


class CudaStep:
    """Replays a recorded forward."""

    samples = True  # takes `Rows.picks`
    captures = True  # the first step of a bucket takes longer

    def __init__(
        self,
        launches: list[Launch],
        inputs: Inputs,
        logits: torch.Tensor,
        argmax: torch.Tensor,
        *,
        max_rows: int,
        max_logits: int,
        workspace_bytes: int,
        cache: Path | None,
        switches_after: int = 0,
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        self.max_rows, self.max_logits = max_rows, max_logits
        self.workspace_bytes = workspace_bytes
        # Rows beyond which another kernel serves than the one that was asked for; 0 if none.
        self.switches_after = switches_after
        self.runs = 0
        self.kept = tuple(kept)  # float32 of shape (max_rows, H) each, for drafts to read
        self._cache = cache
        self._sampler: DeviceSampler | None = None
        self._launches, self._inputs = launches, inputs
        self._logits, self._argmax = logits, argmax
        self._argmax_numpy = argmax.numpy()
        self._host_logits: torch.Tensor | None = None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._row_buckets = [bucket_of(n, ROW_BUCKETS, max_rows) for n in range(max_rows + 1)]
        self._logit_buckets = [
            bucket_of(n, LOGIT_BUCKETS, max_logits) for n in range(max_logits + 1)
        ]
        # A capture must not be on the default stream.
        self._side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, rows: Rows) -> StepResult:
        """Run the forward over `rows`."""
        live, wanted = len(rows.token_ids), len(rows.logit_rows)
        if not 1 <= live <= self.max_rows or wanted > self.max_logits:
            raise ValueError(
                f"a step takes 1 to {self.max_rows} rows and up to {self.max_logits} logits, "
                f"got {live} and {wanted}"
            )
        num_rows = self._row_buckets[live]
        num_logits = self._logit_buckets[wanted]
        if wanted == live and num_rows <= self.max_logits:
            num_logits = num_rows
        self.runs += 1
        if self._inputs.make_room(rows):
            self._graphs.clear()
        self._inputs.send(rows, num_rows, num_logits)
        graph = self._graphs.get((num_rows, num_logits))
        if graph is not None:
            graph.replay()
        else:
            self._run(num_rows, num_logits)
        if rows.picks is not None and wanted:
            self._sample(rows.picks)
        torch.cuda.current_stream().synchronize()
        if graph is None:
            self._graphs[num_rows, num_logits] = self._capture(num_rows, num_logits)
        return DeviceResult(self._argmax_numpy[:wanted], lambda: self._fetch(wanted), run=self.runs)

    def _sample(self, picks: Picks) -> None:
        """Replace argmax by picks where rows are sampled."""
        if self._sampler is None:
            self._sampler = DeviceSampler(self._logits, self._argmax, self._cache)
        self._sampler.launch(picks)

    def _run(self, num_rows: int, num_logits: int) -> None:
        for launch in self._launches:
            launch(num_rows, num_logits)

    def _capture(self, num_rows: int, num_logits: int) -> torch.cuda.CUDAGraph:
        return captured(partial(self._run, num_rows, num_logits), self._side)

    def _fetch(self, wanted: int) -> F32:
        """Return the first logit rows on the host."""
        if self._host_logits is None:
            self._host_logits = torch.empty_like(self._logits, device="cpu").pin_memory()
        host = self._host_logits[:wanted]
        host.copy_(self._logits[:wanted])
        out: F32 = host.numpy()
        return out


def captured(run: Callable[[], None], side: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Return what `run` launches as a graph.

    Args:
        side: any stream but the default one.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side), _no_collection():
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing a dead step's graph, which would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def bucket_of(count: int, buckets: tuple[int, ...], most: int) -> int:
    """Return the smallest bucket that holds `count`, but never more than `most`."""
    index = bisect_left(buckets, count)
    return min(buckets[index], most) if index < len(buckets) else most
