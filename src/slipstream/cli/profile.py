"""`slipstream profile`: measure what rounds cost, look at what is known, or forget it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.settings import MODEL_HELP, engine_config, with_engine_flags
from slipstream.cli.status import progress, status
from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.engine.survey import Survey
    from slipstream.policy.choose import MeasuredPolicy
    from slipstream.policy.profile import ProfileKey


@with_engine_flags
def profile(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    show: Annotated[
        bool, typer.Option("--show", help="Print what is known, and measure nothing.")
    ] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Forget what is known.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", metavar="FILE", show_default=False, help="Copy what is known to a file."
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Measure what a round costs, print it beside the bound, keep it.

    Times are by rows and context. Serving starts from them; what it learned of the drafter, and
    what it owes, stay.
    """
    if sum([show, reset, export is not None]) > 1:
        raise ConfigError("--show, --reset and --export exclude one another")
    config = engine_config(settings)
    if show:
        _show(*_place_of(model, config))
    elif reset:
        _reset(*_place_of(model, config))
    elif export is not None:
        _export(*_place_of(model, config), export)
    else:
        _measure(model, config)


def _place_of(model: str, config: EngineConfig) -> tuple[Path, ProfileKey]:
    """Return folder and key of a model's profile, without loading the model."""
    from slipstream.engine.identity import profile_folder, profile_key
    from slipstream.engine.load import choose_backend, choose_paid
    from slipstream.models.loading import open_model, resolve_model

    file = open_model(resolve_model(model), quantize=config.quantize)
    backend = choose_backend(config)
    paid = choose_paid(config, file, backend)
    return profile_folder(), profile_key(backend, file.fingerprint, config, paid=paid.key)


def _show(folder: Path, key: ProfileKey) -> None:
    from slipstream.policy.choose import MeasuredPolicy
    from slipstream.policy.profile import read_profile

    policy = MeasuredPolicy()
    policy.restore(read_profile(folder, key)["state"])
    print("\n".join([*_table(policy), *_learned(policy), f"kept in {folder / key.file_name}"]))


def _reset(folder: Path, key: ProfileKey) -> None:
    path = folder / key.file_name
    existed = path.exists()
    path.unlink(missing_ok=True)
    print(f"removed {path}" if existed else f"nothing is kept in {path}")


def _export(folder: Path, key: ProfileKey, target: Path) -> None:
    from slipstream.policy.profile import read_profile

    read_profile(folder, key)  # nothing damaged is handed on
    try:
        shutil.copyfile(folder / key.file_name, target)
    except shutil.SameFileError:
        raise ConfigError(f"{target} is the profile itself") from None
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
    print(target)


def _measure(model: str, config: EngineConfig) -> None:
    from slipstream.engine.load import load
    from slipstream.engine.survey import survey

    with status(f"loading {model}"):
        engine = load(model, config)
    policy = engine.policy
    if policy is None:
        raise ConfigError(
            "there is nothing to measure: nothing is ever drafted",
            hint="leave --k and --drafter at auto",
        )
    with progress(model) as report:
        result = survey(engine, policy, report)
    kept = engine.pairing.save()
    where = f"kept in {engine.pairing.path}" if kept else "kept nowhere"
    print("\n".join([*_table(policy), *_bound(result), where]))
    if not kept and config.profile == "on":
        raise SlipstreamError("what was measured could not be kept")


def _table(policy: MeasuredPolicy) -> list[str]:
    """Return milliseconds by row count and context, and multiples of a single row."""
    verify = policy.cost.verify
    levels = {(int(row[0]), int(row[1])): row[2] for row in verify.state()}
    octaves = sorted({octave for _, octave in levels})
    lines = [
        f"{'rows':>5}" + "".join(f"{_context(octave):>12}" for octave in octaves) + "   x of 1 row"
    ]
    for rows in sorted({rows for rows, _ in levels}):
        cells = [levels.get((rows, octave)) for octave in octaves]
        multiples = [
            f"{cell / levels[1, octave]:.2f}"
            for cell, octave in zip(cells, octaves, strict=True)
            if cell is not None and (1, octave) in levels
        ]
        line = f"{rows:>5}" + "".join(
            f"{'-':>12}" if cell is None else f"{1e3 * cell:>9.2f} ms" for cell in cells
        )
        lines.append(f"{line}   {', '.join(multiples) or '-'}")
    return [*lines, "a round pays once it yields more tokens than its multiple"]


def _context(octave: int) -> str:
    """Return an octave's contexts in words."""
    from slipstream.policy.cost import SHORT_KV, octave_of

    low = 1 << (octave - 1)
    return f"below {2 * low}" if octave == octave_of(SHORT_KV) else f"{low}+"


def _bound(result: Survey) -> list[str]:
    """Return what memory alone would allow, against one row."""
    lines = []
    for context_len, times in result.times_s.items():
        bound_s = result.bound_s(context_len)
        lines.append(
            f"bound at context {context_len}: {bound_s * result.bandwidth / 1e6:.1f} MB at "
            f"{result.bandwidth / 1e9:.1f} GB/s take {1e3 * bound_s:.2f} ms; one row takes "
            f"{1e3 * times[1]:.2f} ms, {100 * bound_s / times[1]:.0f} % of the bandwidth"
        )
    return lines


def _learned(policy: MeasuredPolicy) -> list[str]:
    """Return what serving taught: classic steps, acceptance, debt."""
    classic = policy.cost.classic.state()
    lines = [
        f"classic step of batch {int(batch)} at {_context(int(octave))} tokens: "
        f"{1e3 * seconds:.2f} ms"
        for batch, octave, seconds, *_ in classic
    ]
    for known, what in zip(policy.acceptance, ("offered", "drafted"), strict=True):
        chances = ", ".join(f"{chance:.2f}" for chance in known.chances[:4])
        if what == "offered" or policy.paid:
            lines.append(f"chances of acceptance of the first tokens {what}: {chances}")
    return [*lines, f"owed to the loss budget: {1e3 * policy.ledger.debt_s:.1f} ms"]
