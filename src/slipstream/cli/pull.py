"""`slipstream pull`: fetch a model into the cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer


def pull(
    name: Annotated[str, typer.Argument(help="Name of a known model, e.g. smollm2-135m.")],
) -> None:
    """Fetch a model, verify its hash and print its path as the last line."""
    from slipstream.models.loading import pull as fetch

    with _progress(name) as report:
        path = fetch(name, report)
    print(path, flush=True)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[str, float], None]]:
    """Show stages on stderr: a bar on a terminal, one line a stage elsewhere."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def print_stage(stage: str, part: float) -> None:
            if stage not in seen:
                seen.add(stage)
                print(f"{name}: {stage}", file=sys.stderr)

        yield print_stage
        return

    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def move_bar(stage: str, part: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(f"{name}: {stage}", total=1.0)
            bars.update(tasks[stage], completed=part)

        yield move_bar
