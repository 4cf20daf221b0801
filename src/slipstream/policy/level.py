"""One measured level of cost: a mean that neither a compilation nor a hiccup moves.

The first samples are averaged plainly, later ones with a fixed weight, so that the level follows a
device that heats. A sample is compared with what is expected before it counts:

    above DISCARD times         not counted
    beyond CLAMP times          counted as CLAMP times
    STRAYS of these in a row    believed: the level restarts at their median
"""

from __future__ import annotations

from collections.abc import Sequence

# Compilations in the field were 20 times a steady round, scheduling hiccups below 2 times.
DISCARD = 3.0
# Rounds on an idle machine spread by 2 to 5 %: beyond a quarter it is not noise.
CLAMP = 1.25
# Strays in a row, on one side, that are a change and not chance.
STRAYS = 4
# Samples that a level remembers: heating takes seconds, which are hundreds of rounds.
MEMORY = 32.0
# Samples that a level from a profile counts for.
RESTORED = 2.0
# Standard deviation of a level that one sample gave, as a share: see CLAMP's note.
FIRST_SPREAD = 0.05
# Standard deviation over mean absolute deviation of a normal distribution.
SIGMA_PER_DEVIATION = 1.25
# Samples that a mean remembers.
MEAN_MEMORY = 32.0


class Level:
    """Robust moving mean of seconds.

    Args:
        seconds: the first sample.
        kv_tokens: the context it was taken at.
        now: the round it was taken in.
    """

    __slots__ = (
        "changed_at",
        "deviation_s",
        "kv_tokens",
        "moved",
        "seconds",
        "seen_at",
        "steady_s",
        "strays",
        "weight",
    )

    def __init__(self, seconds: float, kv_tokens: float, now: int) -> None:
        self.seconds = seconds
        self.kv_tokens = float(kv_tokens)
        self.deviation_s = FIRST_SPREAD * seconds
        self.weight = 1.0
        self.seen_at = now
        self.changed_at = now  # when it last started anew
        self.moved = 1.0  # by how much it then moved, where that was a change of the machine
        self.steady_s = seconds  # what it was before the strays, which move it a little
        self.strays: list[float] = []

    def add(self, sample: float, kv_tokens: float, now: int, slope: float = 0.0) -> float:
        """Take in one sample; return by how much the level moved if a change was believed, else 1.

        Args:
            sample: seconds.
            slope: seconds per KV token around this level.
        """
        self.seen_at = now
        expected = self.seconds + slope * (kv_tokens - self.kv_tokens)
        if self.weight == 1.0 and sample * DISCARD < expected:
            # The first sample was the outlier; or the machine has changed, and changes back.
            back = sample / expected if self.moved != 1.0 else 1.0
            self._restart(sample, kv_tokens)
            return self._move(back, now)
        low, high = expected / CLAMP, expected * CLAMP
        if low <= sample <= high:
            self.strays.clear()
        elif self._is_change(sample, above=sample > high):
            self._restart(sorted(self.strays)[len(self.strays) // 2], kv_tokens)
            return self._move(self.seconds / self.steady_s if self.steady_s > 0.0 else 1.0, now)
        elif sample > DISCARD * expected:
            return 1.0
        counted = min(max(sample, low), high)
        self.weight = min(self.weight + 1.0, MEMORY)
        self.seconds += (counted - expected) / self.weight
        self.seconds += slope * (kv_tokens - self.kv_tokens) / self.weight
        self.kv_tokens += (kv_tokens - self.kv_tokens) / self.weight
        off = SIGMA_PER_DEVIATION * abs(counted - expected)
        self.deviation_s += (off - self.deviation_s) / self.weight
        return 1.0

    def scale(self, ratio: float, since: int) -> None:
        """Follow a change of the whole machine, unless it was noticed here since round `since`.

        What was noticed the other way is another change, which this one ends.
        """
        if self.changed_at < since or (self.moved > 1.0) != (ratio > 1.0):
            self.seconds *= ratio
            self.deviation_s *= ratio
            self.strays.clear()

    def correct(self, ratio: float) -> None:
        """Multiply what was timed outside serving, unless a round has been timed here since."""
        if self.seen_at <= 0:
            self.seconds *= ratio
            self.deviation_s *= ratio

    def state(self) -> list[float]:
        """Return (seconds, kv tokens, deviation, weight)."""
        return [self.seconds, self.kv_tokens, self.deviation_s, self.weight]

    @classmethod
    def restored(cls, state: Sequence[float], seen_at: int = 0) -> Level:
        """Return the level that `state` described, as if it were of a few samples."""
        seconds, kv_tokens, deviation_s, weight = state
        level = cls(seconds, kv_tokens, seen_at)
        level.deviation_s, level.weight = deviation_s, min(max(weight, 1.0), RESTORED)
        return level

    def _is_change(self, sample: float, *, above: bool) -> bool:
        """Note a stray sample; tell whether there are enough on the same side."""
        if self.strays and (self.strays[-1] > self.seconds) != above:
            self.strays.clear()
        if not self.strays:
            self.steady_s = self.seconds
        self.strays.append(sample)
        return len(self.strays) >= STRAYS

    def _move(self, ratio: float, now: int) -> float:
        """Note a change of the machine, and when."""
        self.moved, self.changed_at = ratio, now
        return ratio

    def _restart(self, seconds: float, kv_tokens: float) -> None:
        self.seconds = seconds
        self.kv_tokens = float(kv_tokens)
        self.deviation_s = FIRST_SPREAD * seconds
        self.weight = 1.0
        self.strays.clear()


class Mean:
    """A moving mean that one sample moves by a limited amount."""

    __slots__ = ("seconds", "weight")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.weight = 0.0

    def add(self, sample: float, jump: float) -> None:
        """Take in one sample; it counts as at most `jump` more than the mean."""
        sample = min(max(sample, 0.0), self.seconds + jump)
        self.weight = min(self.weight + 1.0, MEAN_MEMORY)
        self.seconds += (sample - self.seconds) / self.weight
