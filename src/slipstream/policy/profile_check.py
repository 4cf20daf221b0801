"""What a profile's state may hold: every number's place, kind and range.

A profile is a file that anything may have written. What gets past this can be restored, compared,
divided by and printed; the ranges are far beyond any machine and far below any overflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.types import MAX_K

Range = tuple[float, float]

_COUNT: Range = (1, 1 << 24)  # rows, or sequences of a batch
_OCTAVE: Range = (1, 62)
_WIDTH: Range = (1, MAX_K)
_TIME: Range = (1e-9, 1e4)  # seconds
_SPAN: Range = (0.0, 1e4)  # seconds that may be none
_TOKENS: Range = (0.0, 1e12)
_WEIGHT: Range = (0.0, 1e6)
_CHANCE: Range = (0.0, 1.0)
# An hour of losses: what is owed beyond that was not owed by any run.
_DEBT: Range = (0.0, 3600.0)

_LEVEL = (_TIME, _TOKENS, _SPAN, _WEIGHT)
_BY_ROWS = (_COUNT, _OCTAVE, *_LEVEL)
_DRAFT = (_COUNT, _WIDTH, _SPAN, _TOKENS, _SPAN, _WEIGHT)
_WHOLE = (_COUNT, _OCTAVE, _WIDTH)


def is_sound(state: Any) -> bool:
    """Tell whether a state can be restored by a policy without a surprise, then or later."""
    if not isinstance(state, Mapping) or not isinstance(state.get("cost"), Mapping):
        return False
    cost, known = state["cost"], state.get("acceptance")
    return (
        all(_rows(cost.get(name), _BY_ROWS) for name in ("verify", "classic"))
        and _rows(cost.get("peek"), _LEVEL)
        and len(cost["peek"]) <= 1
        and _rows(cost.get("reading", []), (_SPAN, _TOKENS, _SPAN, _WEIGHT))
        and len(cost.get("reading", [])) <= 1
        and _rows(cost.get("draft"), _DRAFT)
        and _rows(cost.get("overheads"), (_SPAN, _WEIGHT))
        and len(cost["overheads"]) == 2
        and isinstance(known, list)
        and len(known) == 2
        and all(_chances(each) for each in known)
        and _number(state.get("debt_s"), _DEBT)
    )


def _chances(chances: Any) -> bool:
    """Tell whether it is a list of chances of acceptance, position 1 first."""
    return (
        isinstance(chances, list)
        and 1 <= len(chances) <= MAX_K
        and all(_number(chance, _CHANCE) for chance in chances)
    )


def _rows(rows: Any, places: Sequence[Range]) -> bool:
    """Tell whether it is a list of lists with one number for each place."""
    return isinstance(rows, list) and all(
        isinstance(row, list)
        and len(row) == len(places)
        and all(_number(value, place) for value, place in zip(row, places, strict=True))
        for row in rows
    )


def _number(value: Any, place: Range) -> bool:
    """Tell whether it is a number in the range, whole where the place counts something."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if any(place is whole for whole in _WHOLE) and value != int(value):
        return False
    return place[0] <= value <= place[1]
