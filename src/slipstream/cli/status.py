"""What a command is busy with, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show `text` with a spinner while the block runs; on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def progress(name: str) -> Iterator[Callable[[str, float], None]]:
    """Yield what takes (stage, part done): a bar on a terminal, one line a stage elsewhere."""
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
