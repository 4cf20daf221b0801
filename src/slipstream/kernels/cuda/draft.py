"""Record an assistant's draft, and replay it as one CUDA graph for each (rows, k).

All draft steps are recorded one after the other; k tokens take the launches of the first k steps. A
step's tokens stay on the device for the next one and go to pinned memory for the host, which waits
once, at the end. What the target keeps is read where its step left it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from slipstream.kernels.cuda.attention import AttentionRecorder
from slipstream.kernels.cuda.graphs import ROW_BUCKETS, CudaStep, Launch, bucket_of, captured
from slipstream.kernels.cuda.inputs import Inputs
from slipstream.kernels.cuda.kernels import DraftKernels, StepKernels, Vector
from slipstream.kernels.cuda.launches import THREADS, Buffer, Normed
from slipstream.kernels.cuda.linear import CudaWeight, embed
from slipstream.kernels.cuda.pages import KVLayer
from slipstream.kernels.cuda.products import Products
from slipstream.kernels.ops import Clusters, DraftRows, HeadNorms, Int32, Rows

CLUSTERS = THREADS // 32  # of a block: a warp has one
PICK_BLOCKS = 128  # of a row, at most: 262,144 logits are then eight a thread
# Of all rows together: measured, more of them meet at the same places.
_MOST_PICK_BLOCKS, _FEWEST_PICK_BLOCKS = 512, 32
# Draw in draft.cu.
_DRAW = np.dtype(
    [
        ("temperature", np.float32),
        ("seed_low", np.uint32),
        ("seed_high", np.uint32),
        ("choice", np.uint32),
    ]
)


class Kept(Buffer):
    """What a target kept; the rows that chose the anchors are picked from it."""


class DraftRecorder(AttentionRecorder):
    """The `DraftOps` of the CUDA back end; what it shares with a target is the recorder's."""

    def __init__(
        self,
        kernels: StepKernels,
        draft_kernels: DraftKernels,
        inputs: Inputs,
        products: Products,
        target: CudaStep,
        max_k: int,
    ) -> None:
        super().__init__(kernels, inputs, products)
        self._draft_kernels, self._target = draft_kernels, target
        rows = inputs.max_rows
        self._tokens = torch.zeros((max_k, rows), dtype=torch.int32, device="cuda")
        self._drafted = torch.zeros((max_k, rows), dtype=torch.int32).pin_memory()
        self._draws = torch.zeros((rows, _DRAW.itemsize), dtype=torch.uint8, device="cuda")
        self._found = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self._arrivals = torch.zeros(rows, dtype=torch.int32, device="cuda")
        self._ends: list[int] = []  # launches up to each pick
        self._tables: dict[int, tuple[Int32, torch.Tensor]] = {}  # on the device, by identity

    def kept(self, index: int) -> Kept:
        """Return what the target keeps."""
        tensor = self._target.kept[index]
        return Kept(tensor, tensor.shape[1])

    def embed(self, table: CudaWeight, scale: float = 1.0) -> Buffer:
        """Record the embedding of the step's tokens."""
        out = self._buffer(torch.float32, table.k)
        step, to = len(self._ends), out.tensor
        ids = self._tokens[step - 1] if step else None
        inputs = self._inputs  # its tensors move when it grows

        def launch(rows: int, _: int) -> None:
            tokens = inputs.token_ids if ids is None else ids
            embed(tokens, table, to, num_rows=rows, scale=scale)

        self._add(launch)
        return out

    def linear(
        self,
        x: Buffer | Normed,
        weight: CudaWeight,
        residual: Buffer | None = None,
        bias: Vector | None = None,
    ) -> Buffer:
        """Record x @ weight.T (+ residual)."""
        if isinstance(x, Normed) and isinstance(x.source, Kept):
            x = self._operand(x, weight, picks_rows=True)
        return super().linear(x, weight, residual, bias)

    def rope(
        self,
        q: Buffer,
        kv: KVLayer,
        num_heads: int,
        norms: HeadNorms | None = None,
        *,
        advance: bool = True,
    ) -> Buffer:
        """Record norms and rotation of q."""
        shift = 1 + len(self._ends) if advance else 1
        return self._norm_rope(q, kv, norms, num_heads, 0, shift=shift)

    def attention(
        self, q: Buffer, kv: KVLayer, num_heads: int, window: int | None = None
    ) -> Buffer:
        """Record attention over the positions before the anchors."""
        if window is not None:
            kv = replace(kv, attention=replace(kv.attention, window=window))
        return self._attend(q, kv, num_heads)

    def pick(
        self,
        x: Buffer | Normed,
        weight: CudaWeight,
        token_ids: Int32,
        clusters: Clusters | None = None,
    ) -> None:
        """Record the output product and the choice."""
        marks, members, num_clusters = None, None, 0
        if clusters is not None:
            marks, num_clusters = self._mark(x, clusters), clusters.centroids.n
            members = self._table(clusters.members)
        logits = self.linear(x, weight)
        step, width, inputs = len(self._ends), weight.n, self._inputs
        kernel, overlap = self._draft_kernels.pick_drafts, self._kernels.overlap
        most = min(PICK_BLOCKS, math.ceil(width / THREADS))
        head = (logits.tensor, self._draws)
        among = (members, None if marks is None else marks.tensor, num_clusters)
        found = (self._tokens[step], self._drafted[step], self._found, self._arrivals)
        tail = (self._table(token_ids), *among, *found, width, step)

        def launch(rows: int, _: int) -> None:
            arguments = (*head, inputs.positions, *tail)
            blocks = min(most, max(_FEWEST_PICK_BLOCKS, _MOST_PICK_BLOCKS // rows))
            kernel.launch((blocks, rows, 1), (THREADS, 1, 1), arguments, overlap=overlap)

        self._add(launch)
        self._ends.append(len(self._launches))

    def _mark(self, x: Buffer | Normed, clusters: Clusters) -> Buffer:
        """Record which clusters are a row's best: 1 for each of them, 0 for the others."""
        scores = self.linear(x, clusters.centroids)
        marks = self._buffer(torch.int32, scores.width)
        blocks = math.ceil(scores.width / CLUSTERS)
        kernel, overlap = self._draft_kernels.mark_clusters, self._kernels.overlap
        arguments = (scores.tensor, marks.tensor, scores.width, clusters.top)

        def launch(rows: int, _: int) -> None:
            kernel.launch((blocks, rows, 1), (THREADS, 1, 1), arguments, overlap=overlap)

        self._add(launch)
        return marks

    def _table(self, values: Int32) -> torch.Tensor:
        """Return whole numbers on the device, one copy for all draft steps."""
        if id(values) not in self._tables:
            self._tables[id(values)] = values, torch.from_numpy(np.array(values, np.int32)).cuda()
        return self._tables[id(values)][1]

    def finish_draft(self) -> CudaDraft:
        """Return the step that replays what was recorded."""
        assert self._ends, "a draft ends in a pick"
        return CudaDraft(
            [self._launches[:end] for end in self._ends],
            self._inputs,
            self._draws,
            self._drafted,
            self._target,
            workspace_bytes=self._workspace_bytes + self._inputs.num_bytes,
        )


class CudaDraft:
    """Replays a recorded draft.

    Args:
        launches: those of 1, 2, ... tokens.
        draws: on the device, how each row's tokens are picked.
        drafted: pinned, int32 of shape (max_k, max_rows).
        target: its kept values are read, so it stays.
        workspace_bytes: what all of it takes on the device.
    """

    def __init__(
        self,
        launches: list[list[Launch]],
        inputs: Inputs,
        draws: torch.Tensor,
        drafted: torch.Tensor,
        target: CudaStep,
        *,
        workspace_bytes: int,
    ) -> None:
        self.workspace_bytes = workspace_bytes
        self.max_rows, self.max_k = inputs.max_rows, len(launches)
        self._launches, self._inputs, self._target = launches, inputs, target
        self._draws, self._drafted = draws, drafted.numpy()
        self._host_draws = torch.zeros_like(draws, device="cpu").pin_memory()
        self._numpy_draws = self._host_draws.numpy().view(_DRAW)[:, 0]
        self._sequences = np.arange(self.max_rows, dtype=np.int32)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, rows: DraftRows) -> Int32:
        """Return the drafted ids, int32 of shape (B, k)."""
        live, k = len(rows.token_ids), rows.k
        if not 1 <= live <= self.max_rows or not 1 <= k <= self.max_k:
            raise ValueError(
                f"a draft takes 1 to {self.max_rows} rows and 1 to {self.max_k} tokens, "
                f"got {live} and {k}"
            )
        num_rows = bucket_of(live, ROW_BUCKETS, self.max_rows)
        self._send(rows, num_rows)
        graph = self._graphs.get((num_rows, k))
        if graph is not None:
            graph.replay()
        else:
            self._run(num_rows, k)
        torch.cuda.current_stream().synchronize()
        if graph is None:
            self._graphs[num_rows, k] = captured(partial(self._run, num_rows, k), self._side)
        return self._drafted[:k, :live].T

    def _send(self, rows: DraftRows, num_rows: int) -> None:
        """Copy the inputs up: `positions` as those of the last tokens before the anchors."""
        live = len(rows.token_ids)
        inputs = Rows(
            token_ids=rows.token_ids,
            positions=rows.positions - 1,
            sequences=self._sequences[:live],
            page_table=rows.page_table,
            logit_rows=rows.kept_rows,
        )
        if self._inputs.make_room(inputs):
            self._graphs.clear()
        self._inputs.send(inputs, num_rows, num_rows)
        draws = self._numpy_draws[:num_rows]
        draws[live:] = 0
        draws["temperature"][:live] = rows.temperatures
        draws["seed_low"][:live] = (rows.seeds & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        draws["seed_high"][:live] = (rows.seeds >> np.uint64(32)).astype(np.uint32)
        draws["choice"][:live] = rows.choices
        self._draws[:num_rows].copy_(self._host_draws[:num_rows], non_blocking=True)

    def _run(self, num_rows: int, k: int) -> None:
        for launch in self._launches[k - 1]:
            launch(num_rows, num_rows)
