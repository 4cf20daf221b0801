"""One trial: a group of prompts answered once by one arm, with everything that is counted.

Time is decode time: it begins when the last prompt of the group has its first token and ends with
the last token of all; tokens are those that came in between. For a single prompt that is the time
from its first token to its last, as in every reply's `timing`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.engine.engine import Engine
from slipstream.engine.stats import ReplyStats
from slipstream.types import Reply, SamplingParams

Clock = Callable[[], float]


@dataclass(kw_only=True)
class Trial:
    """What one arm did with one group of prompts.

    Attributes:
        arm, group: indices into the run's arms and groups.
        turn: which pass over the arms it was part of, from 0.
        token_ids, texts: of each prompt's reply.
        tokens, seconds: decoded tokens and what they took.
        prefill_s: seconds before.
        forwards: forwards by row count, padding included.
        outcomes: rounds by (drafted, accepted), k > 0.
        waits: (seconds, tokens) of each round of each sequence.
        own_s: what the bench itself took between two steps.
        verdicts: what the policy said at the end of each reply.
        forecasts: the speedup that it predicted there, where it did.
    """

    arm: int
    group: int
    turn: int
    token_ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    prefill_s: float = 0.0
    forwards: Counter[int] = field(default_factory=Counter)
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    waits: list[tuple[float, int]] = field(default_factory=list)
    classic_rounds: int = 0
    classic_s: float = 0.0
    round_s: float = 0.0
    verify_s: float = 0.0
    draft_s: float = 0.0
    own_s: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    forecasts: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Rounds with k > 0."""
        return self.outcomes.total()


def run_trial(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    trial: Trial,
    clock: Clock = time.perf_counter,
) -> Trial:
    """Answer prompts side by side and return the trial, filled in.

    Args:
        prompts: token ids, at most as many as the engine runs at once.
        params: of every reply; one choice each.
    """
    requests = [engine.check(prompt, params)[0] for prompt in prompts]
    for request in requests:
        engine.queue([request])
    unread = {request.id for request in requests}
    counted = [_counts(request.stats) for request in requests]
    last: dict[int, float] = {}
    replies: dict[int, Reply] = {}
    began = started = ended = clock()
    rows = engine.stats.rows
    while engine.num_requests:
        live = engine.num_requests
        before = clock()
        outputs = engine.step()
        now = clock()
        decoding = not unread
        if decoding:
            trial.own_s += before - ended
            trial.forwards[_padded(engine, engine.stats.rows - rows, live)] += 1
        ended, rows = now, engine.stats.rows
        for output in outputs:
            chunk, number = output.chunk, output.request_id
            if decoding:
                trial.tokens += len(chunk.token_ids)
                trial.waits.append((now - last[number], len(chunk.token_ids)))
            last[number] = now
            unread.discard(number)
            if chunk.reply is not None:
                replies[number] = chunk.reply
        if not decoding:
            started = now
            counted = [_counts(request.stats) for request in requests]
    trial.prefill_s, trial.seconds = started - began, ended - started
    for request, (outcomes, classic_rounds, seconds) in zip(requests, counted, strict=True):
        reply, stats = replies[request.id], request.stats
        trial.token_ids.append(reply.token_ids)
        trial.texts.append(reply.text)
        trial.outcomes += stats.outcomes - outcomes
        trial.classic_rounds += stats.classic_rounds - classic_rounds
        for name in _SECONDS:
            spent = getattr(stats, name) - seconds[name]
            setattr(trial, name, getattr(trial, name) + spent)
        trial.verdicts[reply.speculation.verdict] += 1
        if reply.speculation.predicted_speedup is not None:
            trial.forecasts.append(reply.speculation.predicted_speedup)
    return trial


_SECONDS = ("classic_s", "round_s", "verify_s", "draft_s")


def _counts(stats: ReplyStats) -> tuple[Counter[tuple[int, int]], int, dict[str, float]]:
    """Return what a reply has counted so far."""
    seconds = {name: getattr(stats, name) for name in _SECONDS}
    return stats.outcomes.copy(), stats.classic_rounds, seconds


def _padded(engine: Engine, rows: int, live: int) -> int:
    """Return the rows of a forward with its padding; only verifies are padded."""
    pad_to = engine._pad_to
    return rows if rows == live else -(-rows // pad_to) * pad_to
