"""`slipstream serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.output import check_writable, write_text
from slipstream.cli.settings import (
    MODEL_HELP,
    engine_config,
    server_config,
    with_engine_flags,
    with_server_flags,
)
from slipstream.cli.status import status
from slipstream.errors import ConfigError, LoadError

if TYPE_CHECKING:
    from slipstream.config import EngineConfig, ServerConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@with_engine_flags
@with_server_flags
def serve(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FILE",
            show_default=False,
            help="Write what rounds drafted, gained and took when the server stops, "
            "for slipstream simulate.",
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Serve a model over HTTP, with OpenAI's API. docs/serving.md has the details.

    Ctrl-C or SIGTERM lets running requests finish, a second one ends them.
    """
    config = server_config(settings)
    own = _engine_config(config, settings)
    if record is not None:
        check_writable(record)
    try:
        from slipstream.server import run
    except ImportError as error:
        raise LoadError(
            f"the server needs packages that are missing: {error}",
            hint="pip install 'slipstream[server]'",
        ) from error

    from slipstream.cli.generate import trace_recorder
    from slipstream.engine.load import load

    sock = run.bind(config)
    with status(f"loading {model}"):
        engine = load(model, own)
    recorder = None if record is None else trace_recorder(engine, model)
    name = config.served_model_name or _name_of(model)
    if config.host not in LOOPBACK and not config.api_key:
        print(
            f"warning: {config.host} may be open to others, and no --api-key is set",
            file=sys.stderr,
        )

    def ready() -> None:
        print(f"serving {name} on {run.address_of(sock)}", file=sys.stderr, flush=True)

    try:
        run.HttpServer(engine, sock, config, name).run(ready)
    finally:
        if record is not None and recorder is not None:
            write_text(record, recorder.as_json())


def _engine_config(config: ServerConfig, settings: dict[str, Any]) -> EngineConfig:
    """Return the engine's config, the speculative config's settings among its flags."""
    from slipstream.server.speculative_config import speculative_settings

    for name, value in speculative_settings(config.speculative_config).items():
        if settings.get(name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"give either {flag} or --speculative-config, not both")
        settings[name] = value
    return engine_config(settings)


def _name_of(model: str) -> str:
    """Return what requests call a model that was given no name."""
    from slipstream.models.loading.hub import title_of

    path = Path(model)
    if path.is_dir():
        return title_of(path)
    return path.name if path.exists() else model
