"""`slipstream info`: what this machine, and this model on it, will be run with."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from slipstream.cli.settings import engine_config, with_engine_flags


@with_engine_flags
def info(
    model: Annotated[
        str | None, typer.Argument(help="Name of a pulled model, or path of a model file.")
    ] = None,
    **settings: Any,
) -> None:
    """Print device, back end and why, threads, and a model's memory and drafter."""
    engine_config(settings)
