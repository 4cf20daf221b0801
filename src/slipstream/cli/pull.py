"""`slipstream pull`: fetch a model into the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.cli.status import progress
from slipstream.errors import ConfigError


def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of a known model, e.g. smollm2-135m, or a hub id: ORG/NAME, or "
            "ORG/NAME:FILE.gguf where a repository has several."
        ),
    ],
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="REV",
            show_default=False,
            help="Branch, tag or commit of a hub's model; other commands take ORG/NAME@REV.",
        ),
    ] = None,
) -> None:
    """Fetch a model, verify its hash and print its path last.

    Of a hub's repository it takes safetensors, GGUF, JSON and tokenizer files, nothing that runs
    code. What is there already is not fetched again, and a download that broke off is resumed.
    """
    from slipstream.models.loading import pull as fetch

    if revision is not None:
        name = with_revision(name, revision)
    with progress(name) as report:
        path = fetch(name, report)
    print(path, flush=True)


def with_revision(name: str, revision: str) -> str:
    """Return a hub id at a revision.

    Raises:
        ConfigError: only a hub's models have revisions, and one at a time.
    """
    repo, colon, file = name.partition(":")
    if "/" not in repo or "@" in repo:
        raise ConfigError(f"--revision goes with ORG/NAME, got {name}")
    return f"{repo}@{revision}{colon}{file}"
