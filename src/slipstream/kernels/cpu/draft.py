"""Record a draft into a native program: all its steps unrolled, replayed as far as k asks.

What a target keeps is a buffer that its program does not use again; the draft's program reads it in
place. So keeping costs a target's step nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.cpu import _native
from slipstream.kernels.cpu.pages import CpuKVLayer
from slipstream.kernels.cpu.recorder import Buffer, CpuStep, Handle, SharedRecorder, source
from slipstream.kernels.ops import Clusters, DraftRows, HeadNorms, Int32


class DraftRecorder(SharedRecorder):
    """The `DraftOps` of the CPU back end."""

    def __init__(self, target: CpuStep) -> None:
        super().__init__()
        self._target = target
        self._num_picks = 0

    def kept(self, index: int) -> Buffer:
        """Borrow what the target keeps."""
        slot, width = self._target.kept[index]
        self._buffers.append(("borrow", (self._target.program, slot)))
        return Buffer(len(self._buffers) - 1, width)

    def embed(self, table: Any, scale: float = 1.0) -> Buffer:
        """Record the embedding of the step's tokens."""
        return self._embed(table, scale, own=True)

    def rope(
        self,
        q: Buffer,
        kv: CpuKVLayer,
        num_heads: int,
        norms: HeadNorms | None = None,
        *,
        advance: bool = True,
    ) -> Buffer:
        """Record norm and rotation of q."""
        return self._rope(q, kv, norms, num_heads, own=True, advance=advance)

    def attention(
        self, q: Buffer, kv: CpuKVLayer, num_heads: int, window: int | None = None
    ) -> Buffer:
        """Record attention over the positions before the anchors."""
        out = self._of_heads(q, kv, num_heads, own=True)
        seen = kv.attention.window if window is None else window
        self._call("attend_before", q.slot, *kv.place, num_heads, seen, out.slot)
        return out

    def pick(
        self, x: Handle, weight: Any, token_ids: Int32, clusters: Clusters | None = None
    ) -> None:
        """Record the output product and the choice."""
        scores, members, count, top = None, np.empty(0, np.int32), 0, 0
        if clusters is not None:
            scores = self.linear(x, clusters.centroids)
            members, count, top = clusters.members, scores.width, clusters.top
        slot = -1 if scores is None else scores.slot
        out = self._buffer(weight.n)
        chosen = (token_ids, slot, members, count, top, out.slot)
        self._call("pick", *source(x, weight), weight, *chosen)
        self._num_picks += 1

    def finish(self, isa: str, team: Any, max_rows: int, share: int) -> CpuDraft:
        """Build the program and return the step that replays it."""
        none = np.empty((0, 0), np.float32), np.empty(0, np.int32)
        program = self._build(_native.Program(isa, team, max_rows, *none))
        return CpuDraft(program, max_rows, self._num_picks, share, [self._target, *self._keep])


class CpuDraft:
    """Replays a recorded draft."""

    def __init__(
        self, program: Any, max_rows: int, max_k: int, share: int, keep: list[Any]
    ) -> None:
        self.program = program
        self.max_rows, self.max_k = max_rows, max_k
        self._share, self._keep = share, keep
        self._sequences = np.arange(max_rows, dtype=np.int32)
        self._drafted = np.empty((max_k, max_rows), np.int32)

    def __call__(self, rows: DraftRows) -> Int32:
        """Return the drafted ids, int32 of shape (B, k)."""
        num_rows, k = len(rows.token_ids), rows.k
        if not 1 <= num_rows <= self.max_rows or not 1 <= k <= self.max_k:
            raise ValueError(
                f"a draft takes 1 to {self.max_rows} rows and 1 to {self.max_k} tokens, "
                f"got {num_rows} and {k}"
            )
        self.program.run_draft(
            rows.token_ids,
            rows.positions - 1,
            self._sequences[:num_rows],
            rows.page_table,
            rows.kept_rows,
            k,
            rows.temperatures,
            rows.seeds,
            rows.choices,
            self._drafted,
            self._share,
        )
        return self._drafted.reshape(-1)[: k * num_rows].reshape(k, num_rows).T
