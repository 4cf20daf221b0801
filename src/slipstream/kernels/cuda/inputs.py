"""The inputs of a step: filled in on the host, sent up in one copy.

One pinned array and one on the device hold a header, the rows, the rows of logits and the page
table, in this order, so that a copy of as much as is used takes all of it. The page table is last:
it grows with sequences and context.
"""

from __future__ import annotations

import torch

from slipstream.kernels.ops import Rows

HEADER = 16  # inputs[0] is the page table's stride; the rest keeps what follows aligned
# Entries of the page table at first: eight sequences of 131,072 positions.
TABLE_ENTRIES = 1 << 16


class Inputs:
    """Host and device copies of a step's inputs.

    Args:
        max_rows: rows of the widest bucket.
        max_logits: logit rows of the widest bucket.
    """

    def __init__(self, max_rows: int, max_logits: int) -> None:
        self.max_rows = max_rows
        self._edges = (HEADER, *(HEADER + i * max_rows for i in (1, 2, 3)))
        self._table = -(-(self._edges[3] + max_logits) // 4) * 4
        self._allocate(TABLE_ENTRIES)

    def _allocate(self, table_entries: int) -> None:
        size = self._table + table_entries
        self._host = torch.zeros(size, dtype=torch.int32).pin_memory()
        self._device = torch.zeros(size, dtype=torch.int32, device="cuda")
        self._numpy = self._host.numpy()
        tokens, positions, sequences, logits = self._edges
        self.header = self._device
        self.token_ids = self._device[tokens:]
        self.positions = self._device[positions:]
        self.sequences = self._device[sequences:]
        self.logit_rows = self._device[logits:]
        self.page_table = self._device[self._table :]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._device.nbytes

    def make_room(self, rows: Rows) -> bool:
        """Grow to fit a page table; return whether the device's copy has moved."""
        needed = rows.page_table.size
        if self._table + needed <= len(self._numpy):
            return False
        self._allocate(1 << (needed - 1).bit_length())
        return True

    def send(self, rows: Rows, num_rows: int, num_logits: int) -> None:
        """Copy the inputs up on the current stream, padded to a bucket.

        Rows beyond those of `rows` get position -1: they attend to nothing and write no KV.
        """
        host = self._numpy
        live, wanted = len(rows.token_ids), len(rows.logit_rows)
        tokens, positions, sequences, logits = self._edges
        host[tokens : tokens + live] = rows.token_ids
        host[positions : positions + live] = rows.positions
        host[sequences : sequences + live] = rows.sequences
        host[logits : logits + wanted] = rows.logit_rows
        if live < num_rows:
            host[tokens + live : tokens + num_rows] = 0
            host[positions + live : positions + num_rows] = -1
            host[sequences + live : sequences + num_rows] = 0
        if wanted < num_logits:
            host[logits + wanted : logits + num_logits] = 0
        table = rows.page_table
        host[0] = table.shape[1]
        end = self._table + table.size
        host[self._table : end] = table.reshape(-1)
        self._device[:end].copy_(self._host[:end], non_blocking=True)
