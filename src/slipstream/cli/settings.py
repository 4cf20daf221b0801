"""Flags that come from the configs: one for each field, its default read from the dataclass.

A flag that is not given stays None, so that a `SLIPSTREAM_*` variable can speak before the default.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from slipstream.config import PREFIX, EngineConfig, ServerConfig
from slipstream.types import MAX_K

MODEL_HELP = "Name of a pulled model, path of a GGUF file or of a folder, or a hub id."
# Fields that take words as well as numbers.
_METAVARS = {"k": f"auto|off|0..{MAX_K}", "verify_pad": "auto|off|N"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a config as a user meets it."""

    name: str
    flag: str
    variable: str
    default: str
    metavar: str
    help: str


def engine_settings() -> list[Setting]:
    """Return every field of `EngineConfig`, in its order."""
    return _settings_of(EngineConfig)


def server_settings() -> list[Setting]:
    """Return every field of `ServerConfig`, in its order."""
    return _settings_of(ServerConfig)


def _settings_of(config: type[EngineConfig] | type[ServerConfig]) -> list[Setting]:
    return [
        Setting(
            name=item.name,
            flag="--" + item.name.replace("_", "-"),
            variable=PREFIX + item.name.upper(),
            default=str(item.default) or "none",
            metavar=_metavar(item),
            help=item.metadata["help"],
        )
        for item in dataclasses.fields(config)
    ]


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's `**settings` by one text option for each field of `EngineConfig`."""
    return with_engine_flags_but()(command)


def with_engine_flags_but(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what adds the engine's flags to a command, those of some fields left out."""
    options = _options([item for item in engine_settings() if item.name not in names])
    return lambda command: with_options(command, options, last=True)


def with_server_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add one text option for each field of `ServerConfig` to a command."""
    return with_options(command, _options(server_settings()), last=False)


def _options(settings: list[Setting]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    item.flag,
                    metavar=item.metavar,
                    show_default=False,
                    help=f"{_sentence(item.help)} [{item.variable}; default: {item.default}]",
                ),
            ],
        )
        for item in settings
    ]


def with_options(
    command: Callable[..., None], options: list[inspect.Parameter], *, last: bool
) -> Callable[..., None]:
    """Add options to a command that takes them as `**settings`.

    Args:
        last: no more will be added, so `**settings` leaves the signature.
    """
    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())
    kept = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
    rest = [] if last else [p for p in own if p.kind is inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*kept, *options, *rest]
    )
    return command


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """Build the config of a command from its flags, the environment and the defaults.

    Raises:
        ConfigError: a value is wrong, or a variable unknown.
    """
    return EngineConfig.from_env(**settings)


def server_config(settings: dict[str, Any]) -> ServerConfig:
    """Take the server's flags out of a command's settings and build its config.

    Raises:
        ConfigError: a value is wrong, or a variable unknown.
    """
    own = {item.name: settings.pop(item.name) for item in server_settings()}
    return ServerConfig.from_env(**own)


def _metavar(item: dataclasses.Field[Any]) -> str:
    words = [*item.metadata["choices"], *(["PATH", "MODEL"] if item.metadata["paths"] else [])]
    choices = "|".join(words) or item.metadata["metavar"]
    return choices or _METAVARS.get(item.name, "N")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
