"""How many rows a forward may have, and who gets them.

Each decoding sequence is sure of its anchor's row. Prefill gets up to `prefill` rows, and drafts
what is left; where rows are short, drafts keep at least half of what the anchors leave, so neither
prefill nor decoding can be starved. Logit rows have a limit of their own: a large vocabulary times
sixteen rows a sequence would be gigabytes. Every sequence is sure of one, drafts share the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.types import MAX_K

# Memory for the logits of one step: sixteen sequences of sixteen rows with a vocabulary of 65,536.
LOGITS_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class RowBudget:
    """Limits of one forward.

    Attributes:
        num_seqs: sequences at once.
        rows: rows, padding excluded.
        logits: rows whose logits are computed.
        prefill: prompt tokens, of all sequences together.
    """

    num_seqs: int
    rows: int
    logits: int
    prefill: int

    @classmethod
    def of(cls, config: EngineConfig, vocab_size: int) -> RowBudget:
        """Return the limits that a config asks for.

        Raises:
            ConfigError: max_batch_rows has no row for every sequence.
        """
        num_seqs = config.max_num_seqs
        widest = num_seqs * (MAX_K + 1)
        rows = config.max_batch_rows or config.prefill_chunk + widest
        if rows < num_seqs:
            raise ConfigError(
                f"max_batch_rows must be >= max_num_seqs ({num_seqs}), got {config.max_batch_rows}"
            )
        affordable = LOGITS_BYTES // (4 * vocab_size)
        return cls(
            num_seqs=num_seqs,
            rows=rows,
            logits=min(widest, max(affordable, num_seqs + MAX_K)),
            prefill=config.prefill_chunk,
        )

    def prefill_rows(self, num_decoding: int) -> int:
        """Return the rows that prefill may take beside `num_decoding` sequences."""
        left = self.rows - num_decoding
        return min(self.prefill, max(left - num_decoding * MAX_K, (left + 1) // 2))

    def draft_rows(self, num_rows: int, num_seqs: int) -> int:
        """Return how many tokens `num_seqs` sequences with `num_rows` rows so far may draft."""
        return min(self.rows - num_rows, self.logits - num_seqs)


def share_out(wanted: Sequence[int], total: int) -> list[int]:
    """Cut the largest of `wanted` until they sum to at most `total`.

    Args:
        wanted: non-negative counts.
        total: >= 0.

    Returns:
        As many counts; among equals the first keep more. [7, 2, 7] within 11 becomes [5, 2, 4].
    """
    given = list(wanted)
    excess = sum(given) - total
    while excess > 0:
        top = max(given)
        highest = [i for i, count in enumerate(given) if count == top]
        given[highest[-1]] -= 1
        excess -= 1
    return given
