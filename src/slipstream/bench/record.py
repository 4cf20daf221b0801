"""A run as one JSON object: what was asked, what was measured, and every raw number.

Raw trials are columns and rows, since there may be thousands.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.bench.plan import Limits
from slipstream.bench.refuse import Misleading
from slipstream.bench.run import Run
from slipstream.bench.summary import Row, Trials, as_json
from slipstream.bench.trial import Trial
from slipstream.bench.workload import OVERALL, Workload
from slipstream.config import EngineConfig

SCHEMA = "slipstream.bench/1"
TRIAL_COLUMNS = (
    *("arm", "group", "turn", "tokens", "seconds", "prefill_s", "own_s"),
    *("verify_s", "draft_s", "round_s", "classic_s", "classic_rounds", "rounds", "forwards"),
    "ids_crc32",
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What reading every weight once allows, at one row and an empty context.

    Attributes:
        bandwidth: bytes per second, measured.
        how: what measured it.
    """

    weight_bytes: int
    bandwidth: float
    how: str

    @property
    def seconds(self) -> float:
        """The least that a forward takes."""
        return self.weight_bytes / self.bandwidth

    def __str__(self) -> str:
        weights, rate = f"{self.weight_bytes / 1e6:.1f} MB", f"{self.bandwidth / 1e9:.1f} GB/s"
        return (
            f"bound: {weights} of weights at {rate} ({self.how}) take {1e3 * self.seconds:.2f} ms "
            f"a forward, {1 / self.seconds:.0f} classic tokens/s at most"
        )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What was asked for, and what the machine is.

    Attributes:
        config: settings as they were resolved.
        backend: name and reason of the back end.
        times_s: seconds of forwards by row count, of each variant's name, timed before the run.
        context_len: the context at which they were timed.
    """

    provenance: dict[str, Any]
    config: EngineConfig
    backend: dict[str, Any]
    drafter: str
    workload: Workload
    limits: Limits
    bound: Bound
    times_s: dict[str, dict[int, float]]
    context_len: int = 0
    warnings: list[Misleading] = field(default_factory=list)
    peers: dict[str, Any] = field(default_factory=dict)


def record(setup: Setup, run: Run, trials: Trials, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the whole benchmark as JSON values."""
    return {
        "schema": SCHEMA,
        "provenance": {
            **setup.provenance,
            "config": dataclasses.asdict(setup.config),
            "backend": setup.backend,
            "drafter": setup.drafter,
            "limits": dataclasses.asdict(setup.limits),
            "workload": {
                "name": setup.workload.name,
                "sha256": setup.workload.sha256,
                "prompts": {name: len(own) for name, own in setup.workload.categories.items()},
                "groups_run": len({trial.group for trial in run.trials}),
            },
            "peers": setup.peers,
        },
        "warnings": [dataclasses.asdict(warning) for warning in setup.warnings],
        "notes": run.notes,
        "bound": {**vars(setup.bound), "ms": round(1e3 * setup.bound.seconds, 4)},
        "forward_context": setup.context_len,
        "forward_ms": {
            name: {str(rows): round(1e3 * seconds, 4) for rows, seconds in times.items()}
            for name, times in setup.times_s.items()
        },
        "arms": [as_json(row) for row in rows],
        "against_peers": against_peers(trials),
        "failed_peers": run.failed,
        "precision": precision_reached(rows),
        "own_share": round(run.own_share, 6),
        "mismatches": len(run.mismatches),
        "first_mismatch": dataclasses.asdict(run.mismatches[0]) if run.mismatches else None,
        "groups": [
            {
                "category": group.category,
                "ids": [conversation.id for conversation in group.conversations],
                "turn": group.turn,
            }
            for group in run.groups
        ],
        "trials": {
            "arms": [[arm.name, arm.variant.name if arm.variant else ""] for arm in run.arms],
            "columns": TRIAL_COLUMNS,
            "rows": [
                [*(_raw(getattr(trial, name)) for name in TRIAL_COLUMNS[:-1]), _hash(trial)]
                for trial in run.trials
            ],
        },
    }


def against_peers(trials: Trials) -> list[dict[str, Any]]:
    """Return how many times faster our classic and auto are than each peer, by category."""
    arms = trials.run.arms
    ours = [
        index
        for index, arm in enumerate(arms)
        if arm.variant == arms[0].variant and arm.k in (0, "auto")
    ]
    out = []
    for peer, arm in enumerate(arms):
        for index in ours if arm.peer else ():
            for category in (OVERALL, *trials.categories):
                ratio, ci = trials.ratio(index, peer, 1, category)
                if ratio is not None:
                    out.append(
                        {
                            "arm": arms[index].name,
                            "peer": arm.peer,
                            "category": category,
                            "ratio": round(ratio, 4),
                            "ci": ci and [round(value, 4) for value in ci],
                        }
                    )
    return out


def precision_reached(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return how wide intervals are, as a share either side; None where there is none.

    `widest` is that of a category one prompt at a time, else of a row over all categories: groups
    of a batch are few. `without` counts rows of arms that have no interval at all.
    """
    ours = [row for row in rows if row.variant and row.requested_k != 0]
    with_ci = [(width_of(row), row) for row in ours if row.ci is not None]
    judged = [item for item in with_ci if item[1].batch == 1 and item[1].category != OVERALL]
    overall = [item for item in with_ci if item[1].category == OVERALL]
    if not with_ci:
        return None
    width, row = max(judged or overall or with_ci, key=lambda item: item[0])
    return {
        "widest": round(width, 4),
        "of": {"category": row.category, "arm": row.name, "batch": row.batch},
        "overall": round(max(item[0] for item in overall), 4) if overall else None,
        "without": len(ours) - len(with_ci),
    }


def width_of(row: Row) -> float:
    """Return half an interval's width as a share; the row has one."""
    assert row.ci is not None
    return math.sqrt(row.ci[1] / row.ci[0]) - 1


def _hash(trial: Trial) -> int:
    """Return a hash of the token ids of a trial's replies."""
    return zlib.crc32(repr(trial.token_ids).encode())


def _raw(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return {str(key): count for key, count in value.items()} if isinstance(value, dict) else value
