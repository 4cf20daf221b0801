"""`slipstream pull`: fetch a model into the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.cli.status import progress


def pull(
    name: Annotated[str, typer.Argument(help="Name of a known model, e.g. smollm2-135m.")],
) -> None:
    """Fetch a model, verify its hash and print its path as the last line."""
    from slipstream.models.loading import pull as fetch

    with progress(name) as report:
        path = fetch(name, report)
    print(path, flush=True)
