"""`slipstream info`: what this machine, and this model on it, will be run with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream import __version__
from slipstream.cli.settings import engine_config, with_engine_flags
from slipstream.cli.status import status

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.engine.engine import Engine
    from slipstream.kernels.ops import Backend

Row = tuple[str, str]


@with_engine_flags
def info(
    model: Annotated[
        str | None, typer.Argument(help="Name of a pulled model, or path of a model file.")
    ] = None,
    **settings: Any,
) -> None:
    """Print the back end and why, and with MODEL its memory, drafter and width."""
    config = engine_config(settings)

    from slipstream.engine.load import choose_backend, load

    rows: list[Row] = [("slipstream", __version__)]
    if model is None:
        rows += _machine(choose_backend(config))
    else:
        with status(f"loading {model}"):
            engine = load(model, config)
        rows += _machine(engine.target.backend) + _model(engine) + _pairing(config)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def _machine(backend: Backend) -> list[Row]:
    rows = [("back end", f"{backend.name}: {backend.reason}")]
    # What only some back ends have.
    for name in ("isa", "threads"):
        value = getattr(backend, name, None)
        if value is not None:
            rows.append((name, str(value)))
    return [*rows, ("usable cores", str(_num_cores()))]


def _model(engine: Engine) -> list[Row]:
    from slipstream.kernels.ops import PAGE_SIZE

    target = engine.target
    arch = target.arch
    pages = target.kv.num_pages
    return [
        ("architecture", f"{arch.family}, {arch.num_layers} layers, width {arch.hidden_size}"),
        ("vocabulary", str(arch.vocab_size)),
        ("context", f"{target.max_model_len} tokens, trained for {arch.context_len}"),
        ("chat template", "yes" if engine.has_chat_template else "no"),
        ("weights", f"{target.backend.weight_bytes() / 1e6:.1f} MB"),
        ("kv cache", f"{pages} pages of {PAGE_SIZE} tokens"),
        ("load time", f"{engine.load_s:.2f} s"),
    ]


def _pairing(config: EngineConfig) -> list[Row]:
    from slipstream.engine.load import choose_drafter

    make_drafter = choose_drafter(config)
    if make_drafter is None:
        return [("drafter", "none"), ("k", str(config.k))]
    drafter = make_drafter()
    return [
        ("drafter", f"{drafter.name}, at most {drafter.max_k} drafted tokens a round"),
        ("k", str(config.k)),
    ]


def _num_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
