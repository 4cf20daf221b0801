"""Whether what was timed at load holds in serving: the first classic steps tell.

Widths are timed before the first request, and the machine may have had other work just then. Every
width would then look as dear as that minute, while classic steps are timed in service, so nothing
would ever draft, and nothing that never drafts is timed again. The forwards of the first classic
steps were timed at load as well: where they are off, so is all that was timed beside them.
"""

from __future__ import annotations

# Forwards that are compared; their median is taken, so one or two held up are no matter.
STEPS = 5
# An idle machine spreads by 2 to 5 %, and the context adds little: beyond, it is not noise.
OFF = 1.25


class LoadCheck:
    """Compares the first forwards of classic steps with what load said of them."""

    def __init__(self) -> None:
        self._expected_s: float | None = None
        self._rows = 0
        self._forwards: list[float] = []
        self.is_over = False

    def add(self, rows: int, expected_s: float | None, forward_s: float) -> float:
        """Take in a classic step's forward; return what times of load are to be multiplied by.

        Args:
            expected_s: what its rows were expected to take; that of the first step is kept.
        """
        if self._rows != rows or self._expected_s is None:
            self._rows, self._expected_s, self._forwards = rows, expected_s, []
        if not self._expected_s:
            return 1.0
        self._forwards.append(forward_s)
        if len(self._forwards) < STEPS:
            return 1.0
        self.is_over = True
        ratio = sorted(self._forwards)[STEPS // 2] / self._expected_s
        return 1.0 if 1 / OFF <= ratio <= OFF else ratio
