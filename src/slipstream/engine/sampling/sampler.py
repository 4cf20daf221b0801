"""Choose the token that follows a row: the target's own choice, greedy or sampled.

`token(position) = argmax(logits / T + gumbel(seed, choice, position, token))` over the filtered
ids. The noise knows neither the call nor the drafter, so a draft is accepted iff it is this very
token, the emitted tokens follow the target's distribution exactly, and one seed gives one text with
any drafter or none (Daliri, Musco and Suresh 2024, "Coupling without communication and
drafter-invariant speculative decoding"). A drafter that samples its own logits through the same
sampler sees the same noise, which is what couples the two.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from slipstream.engine.matcher import Matcher
from slipstream.engine.sampling.history import RowHistory
from slipstream.engine.sampling.kernel import PickKernel
from slipstream.engine.sampling.processors import Processors
from slipstream.errors import SlipstreamError
from slipstream.kernels.noise import NoiseKey
from slipstream.kernels.ops import F32
from slipstream.types import SamplingParams, TokenLogprobs


class PickSettings(NamedTuple):
    """What a pick goes by besides row and position."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int


class Sampler:
    """Chooses the tokens of one reply; holds nothing that a call changes.

    Args:
        params: checked by `validate_sampling`.
        vocab_size: length of a row.
        seed: unsigned 64 bits, the request's own or drawn.
        choice: index among the n replies to one prompt.
        stop_ids: ids that end the reply, banned while `min_tokens` asks for more.
        bad_words_ids: `params.bad_words` in tokens.
        kernel: the implementation; all give the same tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        seed: int,
        choice: int = 0,
        stop_ids: Collection[int] = (),
        bad_words_ids: Iterable[Iterable[int]] = (),
        kernel: PickKernel,
    ) -> None:
        # Plain numbers: numpy's own would compute in another precision than the kernels.
        self._temperature = float(params.temperature)
        self._top_k, self._top_p = int(params.top_k), float(params.top_p)
        self._min_p = float(params.min_p)
        self._num_top = int(params.logprobs or 0)
        self._vocab_size = vocab_size
        self._seed, self._choice = int(seed), choice
        self._processors = Processors(params, stop_ids=stop_ids, bad_words_ids=bad_words_ids)
        self._kernel = kernel

    @property
    def is_argmax(self) -> bool:
        """Whether a row's token is just the first of its largest raw logits.

        A step's own argmax then serves, as long as no grammar masks the row.
        """
        return bool(np.float32(self._temperature) == 0) and self._processors.idle

    @property
    def is_plain(self) -> bool:
        """Whether a row's logits, its position and the settings alone decide on its token."""
        return self._processors.idle

    def settings(self) -> PickSettings:
        """Return what a pick goes by besides row and position."""
        return PickSettings(
            temperature=float(np.float32(self._temperature)),
            top_k=self._top_k,
            top_p=self._top_p,
            min_p=self._min_p,
            seed=self._seed,
            choice=self._choice,
        )

    def history(self, prompt_ids: Iterable[int], matcher: Matcher | None = None) -> RowHistory:
        """Return a history that keeps what this sampler needs, and a grammar's matcher."""
        counts = self._processors.counts_tokens
        return RowHistory(
            prompt_ids, vocab_size=self._vocab_size if counts else None, matcher=matcher
        )

    def pick(self, logits: F32, history: RowHistory, position: int) -> int:
        """Return the token that follows one row.

        Args:
            logits: raw, float32 of shape (V,); not written.
            history: the tokens before the row, in-flight drafts included.
            position: index of the wanted token in the sequence, `len(history)` in a reply.

        Raises:
            SlipstreamError: no token is left (all logits NaN, -inf or forbidden), or a logit is
                +inf. Single NaNs are tokens that are never chosen.
        """
        assert logits.shape == (self._vocab_size,)
        token = self._kernel.pick(
            logits,
            *self._processors.overrides(logits, history),
            history.allowed,
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            min_p=self._min_p,
            key=NoiseKey(seed=self._seed, choice=self._choice, position=position),
        )
        if token < 0:
            raise no_token(position)
        return token

    def pick_run(
        self,
        rows: Sequence[F32] | F32,
        history: RowHistory,
        drafts: Sequence[int],
        argmax: Sequence[int] = (),
    ) -> list[int]:
        """Return the tokens of a verify: its accepted drafts and the bonus token.

        Rows behind the first rejected draft are never looked at. The tokens are pushed onto the
        history, which then ends in the bonus token.

        Args:
            rows: raw logits of the k + 1 rows.
            history: the committed tokens.
            drafts: k drafted ids.
            argmax: argmax of each row, if it is known: where it is what is wanted and the grammar
                allows it, no mask is computed.
        """
        emitted: list[int] = []
        known = argmax if self.is_argmax and history.matcher is not None else ()
        for index, (row, draft) in enumerate(zip(rows, [*drafts, None], strict=True)):
            if known and history.surely_allows(known[index]):
                token = known[index]
            else:
                token = self.pick(row, history, len(history))
            history.push(token)
            emitted.append(token)
            if token != draft:
                break
        return emitted

    def logprobs(self, logits: F32, token: int) -> TokenLogprobs:
        """Return the raw log-probabilities of a row: float32, the sum behind them exact.

        Args:
            logits: raw, float32 of shape (V,).
            token: the chosen id.

        Raises:
            SlipstreamError: no logit is finite, or one is +inf.
        """
        summary = self._kernel.summarize(logits, self._num_top)
        if summary is None:
            raise no_token(None)
        largest, total, top = summary
        log_total = math.log(total)

        def logprob(token_id: int) -> float:
            return float(np.float32(float(logits[token_id]) - largest - log_total))

        own = logits[token]
        before = np.count_nonzero(logits > own) + np.count_nonzero(logits[:token] == own)
        order = sorted(top.tolist(), key=lambda token_id: (-float(logits[token_id]), token_id))
        return TokenLogprobs(
            logprob=logprob(token),
            top=[(token_id, logprob(token_id)) for token_id in order],
            rank=1 + int(before),
        )


def no_token(position: int | None) -> SlipstreamError:
    """Return the error of a row without a token."""
    where = "" if position is None else f" at position {position}"
    return SlipstreamError(
        f"a row{where} must have a finite largest logit, got none",
        hint="the model's output is broken, or every token is forbidden",
    )
