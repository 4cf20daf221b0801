"""`slipstream pull`: fetch a model into the cache."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    name: Annotated[str, typer.Argument(help="Name of a known model, e.g. smollm2-135m.")],
) -> None:
    """Fetch a model, verify its hash and print its path."""
    from slipstream.models.loading import pull as fetch

    print(fetch(name), flush=True)
