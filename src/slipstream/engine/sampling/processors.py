"""What changes logits before a token is chosen: penalties, bias, bad words, min_tokens.

The result is a sparse list of ids and new values relative to the raw row, which is never written:
returned log-probabilities are the raw ones. Of an id that comes twice the last value counts, so
later processors are simply appended. A grammar's mask is dense and goes to the kernel beside the
list; a complete grammar ends a reply that `min_tokens` would have go on.

Order and arithmetic are vLLM's: the repetition penalty looks at prompt and output, frequency and
presence at the output alone; then the bias is added; bans come last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from slipstream.engine.sampling.history import RowHistory, TokenCounts
from slipstream.kernels.ops import F32, Int32
from slipstream.types import SamplingParams

Overrides = tuple[Int32, F32]

_NO_IDS: Int32 = np.zeros(0, np.int32)
_NO_VALUES: F32 = np.zeros(0, np.float32)


class Processors:
    """The processors of one request.

    Args:
        params: checked by `validate_sampling`; `bad_words` is not read.
        stop_ids: ids that end the reply.
        bad_words_ids: further bad words, the caller's texts in tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        stop_ids: Collection[int] = (),
        bad_words_ids: Iterable[Iterable[int]] = (),
    ) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        bias = params.logit_bias or ()
        pairs = dict(bias.items() if isinstance(bias, Mapping) else bias)
        self._bias_ids = np.array(list(pairs), np.int32)
        self._bias = np.array(list(pairs.values()), np.float32)
        self._min_tokens = params.min_tokens
        self._stop_ids = np.array(sorted(stop_ids), np.int32)
        self._banned, self._completions = _bad_words([*params.bad_words_ids, *bad_words_ids])

    @property
    def counts_tokens(self) -> bool:
        """Whether a history needs counts."""
        return bool(self._repetition != 1 or self._frequency != 0 or self._presence != 0)

    @property
    def idle(self) -> bool:
        """Whether no row is ever changed."""
        bans = len(self._banned) or self._completions or (self._min_tokens and len(self._stop_ids))
        return not (self.counts_tokens or len(self._bias_ids) or bans)

    def overrides(self, logits: F32, history: RowHistory) -> Overrides:
        """Return what replaces some logits of a row.

        Args:
            logits: raw, float32 of shape (V,); read only.
            history: the tokens before the row, drafts included; with counts where
                `counts_tokens` says so.

        Returns:
            int32 ids of shape (N,) and float32 values of shape (N,); of an id that comes twice
            the last counts.
        """
        if self.idle:
            return _NO_IDS, _NO_VALUES
        ids, values = [], []
        penalised = self._penalised_ids(history)
        for some, bias in ((penalised, None), (self._bias_ids, self._bias)):
            if len(some):
                own = self._penalise(logits[some], some, history)
                ids.append(some)
                values.append(own if bias is None else own + bias)
        banned = self._banned_ids(history)
        ids += banned
        values += [np.full(len(some), -np.inf, np.float32) for some in banned]
        if not ids:
            return _NO_IDS, _NO_VALUES
        return np.concatenate(ids), np.concatenate(values)

    def _penalised_ids(self, history: RowHistory) -> Int32:
        if not self.counts_tokens:
            return _NO_IDS
        seen, output = _counts(history)
        return seen.distinct if self._repetition != 1 else output.distinct

    def _penalise(self, values: F32, ids: Int32, history: RowHistory) -> F32:
        """Return the logits of some ids after all penalties."""
        if not self.counts_tokens:
            return values
        seen, output = _counts(history)
        if self._repetition != 1:
            repeated = np.where(values > 0, values / self._repetition, values * self._repetition)
            values = np.where(seen.counts[ids] > 0, repeated, values)
        counts = output.counts[ids].astype(np.float32)
        return values - self._frequency * counts - self._presence * np.minimum(counts, 1)

    def _banned_ids(self, history: RowHistory) -> list[Int32]:
        banned = [self._banned] if len(self._banned) else []
        if self._completions and len(history):
            completed = [
                last
                for prefix, last in self._completions.get(history.token_ids[-1], ())
                if history.ends_in(prefix)
            ]
            if completed:
                banned.append(np.array(completed, np.int32))
        if history.num_outputs < self._min_tokens and not history.must_stop:
            banned.append(self._stop_ids)
        return banned


def _counts(history: RowHistory) -> tuple[TokenCounts, TokenCounts]:
    """Return the counts over prompt and output, and over the output."""
    assert history.seen is not None, "a history without counts"
    assert history.output is not None, "a history without counts"
    return history.seen, history.output


def _bad_words(
    words: Iterable[Iterable[int]],
) -> tuple[Int32, Mapping[int, list[tuple[tuple[int, ...], int]]]]:
    """Return ids banned everywhere, and (prefix, last id) of longer words by the prefix's end."""
    single = []
    longer = defaultdict(list)
    for word in words:
        *prefix, last = word
        if prefix:
            longer[prefix[-1]].append((tuple(prefix), last))
        else:
            single.append(last)
    return np.array(sorted(set(single)), np.int32), longer
