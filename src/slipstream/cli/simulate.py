"""`slipstream simulate`: what the policy would have made of recorded pairings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slipstream.policy.replay import Verdict


def simulate(
    file: Annotated[Path, typer.Argument(help="JSON file of traces; docs/policy.md has its form.")],
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON list instead of a table.")
    ] = False,
) -> None:
    """Replay recorded pairings through the policy; print its verdicts.

    It chooses among the recorded widths only; a trace that lacks a time or an acceptance is
    unknown.
    """
    import json
    from dataclasses import asdict

    from slipstream.policy.replay import judge, load_traces

    verdicts = [judge(trace, number) for number, trace in enumerate(load_traces(file), 1)]
    if json_output:
        print(json.dumps([asdict(verdict) for verdict in verdicts], allow_nan=False))
        return
    width = max([len(verdict.name) for verdict in verdicts], default=0)
    for verdict in verdicts:
        print(f"{verdict.name:<{width}}  {_line(verdict)}")


def _line(verdict: Verdict) -> str:
    """Return a verdict in one line; its reason begins with its word."""
    if verdict.predicted_speedup is None:
        return verdict.reason
    return f"k = {verdict.k:<2}  {verdict.predicted_speedup:5.2f}x  {verdict.reason}"
