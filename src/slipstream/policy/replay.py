"""Replays recorded pairings through the policy's estimate and says what it would have chosen.

A file holds traces: what a classic step took, and for some drafted widths ("arms") what a round
took and how much was accepted. An arm may be given as means, or a trace as single rounds, as a
server can write them; rounds are averaged by width first. The choice is among recorded widths only:
nothing is interpolated, and what is missing stays unknown. The format is in docs/policy.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import ConfigError
from slipstream.policy.estimate import compare, pick, speedup

SCHEMA = 1

TraceVerdict = Literal["enable", "decline", "unknown"]


@dataclass(frozen=True, kw_only=True)
class ArmVerdict:
    """One recorded width.

    Attributes:
        drafted: drafted tokens, the anchor not counted.
        predicted_speedup: S from its round time and acceptance; None where either is missing.
        measured_speedup: as recorded, None where it was not.
        derived: its time or acceptance was worked out from the measured speedup, or assumed, so
            that the prediction repeats the measurement and says nothing about accuracy.
    """

    drafted: int
    predicted_speedup: float | None
    measured_speedup: float | None
    derived: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the policy makes of one trace; its fields are those of `simulate --json`.

    Attributes:
        k: drafted tokens to run, 0 unless the verdict is "enable".
        predicted_speedup: S of the best recorded width, None if unknown.
        margin: predicted_speedup - 1.
    """

    name: str
    verdict: TraceVerdict
    k: int
    predicted_speedup: float | None
    margin: float | None
    reason: str
    arms: list[ArmVerdict]


def load_traces(path: Path) -> list[dict[str, Any]]:
    """Return the traces of a file.

    Raises:
        ConfigError: it is not such a file; the message says where.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        got = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"{path}: schema must be {SCHEMA}, got {got!r}")
    traces = content.get("traces")
    if not isinstance(traces, list) or not all(isinstance(trace, dict) for trace in traces):
        raise ConfigError(f"{path}: traces must be a list of objects")
    return traces


def judge(trace: Mapping[str, Any], number: int = 1) -> Verdict:
    """Return what the policy makes of a trace.

    Args:
        number: its place in the file, from 1, to name it by if it has no name.

    Raises:
        ConfigError: a field has a value that cannot be; null is not an error but unknown.
    """
    name = str(trace.get("name") or f"trace {number}")
    classic_ms = _number(trace, "classic_ms", name)
    recorded: list[Mapping[str, Any]] = _objects(trace, "arms", name)
    rounds = _objects(trace, "rounds", name)
    if rounds:
        classic_ms, recorded = _averages(rounds, classic_ms, name)
    arms, rounds_by_k = [], {}
    for arm in recorded:
        k = arm.get("drafted")
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ConfigError(f"{name}: drafted must be a whole number of 1 or more, got {k!r}")
        if k in rounds_by_k:
            raise ConfigError(f"{name}: drafted = {k} is there twice")
        round_ms = _number(arm, "round_ms", name)
        accepted = _number(arm, "accepted_per_round", name, low=0.0, high=float(k))
        rounds_by_k[k] = (round_ms, accepted)
        known = None not in (classic_ms, round_ms, accepted)
        arms.append(
            ArmVerdict(
                drafted=k,
                predicted_speedup=speedup(1.0 + (accepted or 0.0), classic_ms or 0.0, round_ms)
                if known and round_ms is not None
                else None,
                measured_speedup=_number(arm, "measured_speedup", name),
                derived=any(key.endswith(("_derived_from_speedup", "_assumed")) for key in arm),
            )
        )
    arms.sort(key=lambda arm: arm.drafted)
    priced = [
        (arm.drafted, arm.predicted_speedup) for arm in arms if arm.predicted_speedup is not None
    ]
    k = pick(priced)
    if k == 0 and (len(priced) < len(arms) or not priced):
        missing = "classic_ms" if classic_ms is None else "an arm's time or acceptance"
        missing = missing if arms else "every arm"
        return Verdict(
            name=name,
            verdict="unknown",
            k=0,
            predicted_speedup=None,
            margin=None,
            reason=f"unknown: {missing} was not recorded",
            arms=arms,
        )
    best = dict(priced)[k] if k else max(value for _, value in priced)
    shown = k or next(width for width, value in priced if value == best)
    round_ms, accepted = rounds_by_k[shown]
    verdict: TraceVerdict = "enable" if k else "decline"
    words = compare((round_ms or 0.0) / 1e3, 1.0 + (accepted or 0.0), (classic_ms or 0.0) / 1e3)
    return Verdict(
        name=name,
        verdict=verdict,
        k=k,
        predicted_speedup=round(best, 4),
        margin=round(best - 1.0, 4),
        reason=f"{verdict}: {words}",
        arms=arms,
    )


def _averages(
    rounds: Sequence[Mapping[str, Any]], classic_ms: float | None, name: str
) -> tuple[float | None, list[Mapping[str, Any]]]:
    """Return the classic step and the arms that single rounds amount to."""
    by_k: dict[int, list[tuple[float, float]]] = {}
    for entry in rounds:
        k = entry.get("k")
        if not isinstance(k, int) or isinstance(k, bool) or k < 0:
            raise ConfigError(f"{name}: a round's k must be a whole number, got {k!r}")
        round_ms = _number(entry, "round_ms", name)
        accepted = _number(entry, "accepted", name, low=0.0, high=float(k)) if k else 0.0
        if round_ms is not None and accepted is not None:
            by_k.setdefault(k, []).append((round_ms, accepted))
    arms: list[Mapping[str, Any]] = []
    for k, samples in sorted(by_k.items()):
        mean_ms = math.fsum(ms for ms, _ in samples) / len(samples)
        if k == 0:
            classic_ms = mean_ms
            continue
        mean = math.fsum(accepted for _, accepted in samples) / len(samples)
        arms.append({"drafted": k, "round_ms": mean_ms, "accepted_per_round": mean})
    return classic_ms, arms


def _objects(trace: Mapping[str, Any], key: str, name: str) -> list[Mapping[str, Any]]:
    """Return a list of objects, empty where it is missing or null."""
    value = trace.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{name}: {key} must be a list of objects")
    return value


def _number(
    entry: Mapping[str, Any], key: str, name: str, *, low: float | None = None, high: float = 1e12
) -> float | None:
    """Return a number, None where it is missing or null; above zero unless `low` says otherwise."""
    value = entry.get(key)
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (value > 0.0 if low is None else value >= low) or value > high:
        bound = "above 0" if low is None else f"in [{low:g}, {high:g}]"
        raise ConfigError(f"{name}: {key} must be a number {bound} or null, got {value!r}")
    return float(value)
