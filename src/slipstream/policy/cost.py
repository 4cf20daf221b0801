"""What a forward costs: a staircase over row counts, measured, at the context it was measured at.

Kernels serve row counts in buckets, and a device's cost jumps from one bucket to the next, so
nothing is ever interpolated between row counts. Along the context cost is smooth: each bucket keeps
one level per octave of KV tokens and draws straight lines between them.

Levels are robust. A sample far above what is expected (a compilation, a page fault) is discarded,
one that is merely off is clamped, and several in a row on the same side are believed. The ledger
never sees this: it is charged raw time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence

from slipstream.policy.level import Level

# Row counts up to sixteen share one weight read each in its own way; beyond them, tiles.
DEFAULT_EDGES = (*range(1, 17), 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
# Contexts below this share one level: attention is a few percent of a step there.
SHORT_KV = 256
# A first sample this many times above its bound is held to be a compilation until one more says so.
SUSPECT = 3.0
# Worst case of an estimate: these standard deviations and this share on top.
WORST_SIGMAS = 2.0
WORST_SHARE = 0.02
# The same share where the bucket was never run at a context like this one.
WORST_SHARE_ELSEWHERE = 0.25
# Levels give a slope if their contexts differ by this share of the longer one: noise of two levels
# close to each other would be a slope of anything.
FAR_APART = 0.5
# What a line has at no context at least, as a share of its level: a forward reads its weights
# whatever the context, so a line that noise made steeper than that is no use.
LEAST_START = 0.05

Line = tuple[float, float]


def octave_of(kv_tokens: int) -> int:
    """Return the octave that a number of KV tokens falls into."""
    return max(kv_tokens, SHORT_KV).bit_length()


class Staircase:
    """Seconds by row count and KV tokens.

    Args:
        edges: the largest row count of each bucket, ascending.
    """

    def __init__(self, edges: Sequence[int] = DEFAULT_EDGES) -> None:
        self.edges = tuple(edges)
        self._levels: dict[int, dict[int, Level]] = {}
        self._suspects: dict[int, float] = {}
        self._lines: dict[int, dict[int, Line]] = {}  # by octave and bucket, until observed
        self._buckets = [self._bucket(rows) for rows in range(64)]  # what batch 1 looks up

    def bucket(self, rows: int) -> int:
        """Return the bucket of a row count: the row count that it is padded to at most."""
        return self._buckets[rows] if rows < 64 else self._bucket(rows)

    def _bucket(self, rows: int) -> int:
        index = bisect_left(self.edges, rows)
        return self.edges[index] if index < len(self.edges) else rows

    def observe(self, rows: int, kv_tokens: int, seconds: float, now: int = 0) -> float:
        """Take in one sample.

        Args:
            now: a count of rounds, kept as the time when the bucket was last seen.

        Returns:
            By how much the level moved if samples in a row said that it is another, else 1.
        """
        ratio = 1.0
        bucket, octave = self.bucket(rows), octave_of(kv_tokens)
        levels = self._levels.get(bucket)
        if levels is None:
            bound = self.bound_s(rows, kv_tokens)
            first = self._suspects.get(bucket)
            if bound is not None and first is None and seconds > SUSPECT * bound:
                self._suspects[bucket] = seconds
                return ratio
            self._levels[bucket] = {octave: Level(min(seconds, first or seconds), kv_tokens, now)}
        elif octave in levels:
            slope = self._line(bucket, octave)[1]
            ratio = levels[octave].add(seconds, kv_tokens, now, slope)
        else:
            start, slope = self._line(bucket, octave)
            expected = start + slope * kv_tokens
            levels[octave] = Level(min(seconds, SUSPECT * expected), kv_tokens, now)
        for lines in self._lines.values():
            lines.pop(bucket, None)
        return ratio

    def scale(self, ratio: float, since: int) -> None:
        """Take all times for so many times as long, those excepted that changed since a round."""
        for levels in self._levels.values():
            for level in levels.values():
                level.scale(ratio, since)
        self._lines.clear()

    def correct(self, ratio: float) -> None:
        """Multiply what was timed outside serving; see `Level.correct`."""
        for levels in self._levels.values():
            for level in levels.values():
                level.correct(ratio)
        self._lines.clear()

    def time_s(self, rows: int, kv_tokens: int) -> float | None:
        """Return the expected seconds, None where the bucket was never measured."""
        bucket = self.bucket(rows)
        if bucket not in self._levels:
            return None
        start, slope = self._line_at(bucket, octave_of(kv_tokens))
        return start + slope * kv_tokens

    def times_s(self, rows: int, count: int, kv_tokens: int) -> list[float | None]:
        """Return the expected seconds of `count` row counts from `rows` on."""
        octave = octave_of(kv_tokens)
        buckets, known, lines = self._buckets, self._levels, self._lines.get(octave, {})
        times: list[float | None] = []
        for each in range(rows, rows + count):
            bucket = buckets[each] if each < 64 else self._bucket(each)
            line = lines.get(bucket)
            if line is None:
                if bucket not in known:
                    times.append(None)
                    continue
                line = self._line_at(bucket, octave)
            times.append(line[0] + line[1] * kv_tokens)
        return times

    def worst_s(self, rows: int, kv_tokens: int) -> float | None:
        """Return what a forward may take at worst; None where nothing at all was measured."""
        bucket, octave = self.bucket(rows), octave_of(kv_tokens)
        levels = self._levels.get(bucket)
        if levels is None:
            return self.bound_s(rows, kv_tokens)
        expected = self.time_s(rows, kv_tokens) or 0.0
        level = levels.get(octave)
        if level is None:
            return expected * (1.0 + WORST_SHARE_ELSEWHERE)
        return expected * (1.0 + WORST_SHARE) + WORST_SIGMAS * level.deviation_s

    def low_s(self, rows: int, kv_tokens: int, sigmas: float) -> float | None:
        """Return a lower confidence bound of the expected seconds."""
        expected = self.time_s(rows, kv_tokens)
        if expected is None:
            return None
        level = self.level(rows, kv_tokens)
        spread = level.deviation_s / math.sqrt(level.weight) if level else WORST_SHARE * expected
        return max(expected - sigmas * spread, 0.5 * expected)

    def bound_s(self, rows: int, kv_tokens: int) -> float | None:
        """Return an upper bound of a bucket that was never run, from its neighbours.

        A wider forward that was measured does at least as much; a narrower one run several times
        over reads the weights once for each time.
        """
        bucket = self.bucket(rows)
        wider = [known for known in self._levels if known > bucket]
        if wider:
            return self.worst_s(min(wider), kv_tokens)
        narrower = [known for known in self._levels if known < bucket]
        if not narrower:
            return None
        known = max(narrower)
        return math.ceil(bucket / known) * (self.worst_s(known, kv_tokens) or 0.0)

    def least_s(self, rows: int, kv_tokens: int) -> float | None:
        """Return a lower bound of a bucket that was never run: its widest narrower neighbour."""
        narrower = [known for known in self._levels if known < self.bucket(rows)]
        return self.time_s(max(narrower), kv_tokens) if narrower else None

    def level(self, rows: int, kv_tokens: int) -> Level | None:
        """Return what is kept about a bucket at a context's octave."""
        return self._levels.get(self.bucket(rows), {}).get(octave_of(kv_tokens))

    @property
    def widest(self) -> int:
        """The widest bucket that was measured, 0 for none."""
        return max(self._levels, default=0)

    def knows(self, rows: int) -> bool:
        """Tell whether a bucket was measured, at any context."""
        return self.bucket(rows) in self._levels

    def samples(self, rows: int) -> float:
        """Return how many samples a bucket remembers, over all contexts."""
        levels = self._levels.get(self.bucket(rows))
        return sum([level.weight for level in levels.values()]) if levels else 0.0

    def seen_at(self, rows: int) -> int | None:
        """Return the round in which a bucket was last run, at any context."""
        levels = self._levels.get(self.bucket(rows))
        return max(level.seen_at for level in levels.values()) if levels else None

    def drop(self, octaves: Collection[int]) -> None:
        """Let go of what was measured at some octaves of context."""
        for bucket, levels in list(self._levels.items()):
            kept = {octave: level for octave, level in levels.items() if octave not in octaves}
            self._levels[bucket] = kept
            if not kept:
                del self._levels[bucket]
        self._lines.clear()

    def state(self) -> list[list[float]]:
        """Return rows of (bucket, octave, seconds, kv tokens, deviation, weight)."""
        return [
            [bucket, octave, *level.state()]
            for bucket, levels in sorted(self._levels.items())
            for octave, level in sorted(levels.items())
        ]

    def restore(self, rows: Sequence[Sequence[float]], seen_at: int = 0) -> None:
        """Take over what `state` returned, as seen in round `seen_at`."""
        self._levels.clear()
        self._lines.clear()
        for bucket, octave, *state in rows:
            self._levels.setdefault(int(bucket), {})[int(octave)] = Level.restored(state, seen_at)

    def _line_at(self, bucket: int, octave: int) -> Line:
        """Return `_line`, worked out once for all calls between two samples."""
        lines = self._lines.get(octave)
        if lines is None:
            lines = self._lines[octave] = {}
        line = lines.get(bucket)
        if line is None:
            line = lines[bucket] = self._line(bucket, octave)
        return line

    def _line(self, bucket: int, octave: int) -> Line:
        """Return (start, slope) along the context around an octave."""
        return _line_through(self._levels[bucket], octave)


def _line_through(levels: dict[int, Level], octave: int) -> Line:
    """Return the line through the nearest levels that are far enough apart; else flat."""
    near = sorted(levels, key=lambda known: (abs(known - octave), known))
    first = levels[near[0]]
    for other in near[1:]:
        second = levels[other]
        run = second.kv_tokens - first.kv_tokens
        if abs(run) >= FAR_APART * max(first.kv_tokens, second.kv_tokens):
            slope = max(0.0, (second.seconds - first.seconds) / run)
            if slope * first.kv_tokens > (1.0 - LEAST_START) * first.seconds:
                slope = (1.0 - LEAST_START) * first.seconds / first.kv_tokens
            return first.seconds - slope * first.kv_tokens, slope
    return first.seconds, 0.0
