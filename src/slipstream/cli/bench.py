"""`slipstream bench`: what speculation gains or costs on this machine, outputs compared."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.output import check_writable, write_text
from slipstream.cli.settings import MODEL_HELP, engine_config, with_engine_flags_but
from slipstream.cli.status import progress
from slipstream.config import NGRAM_AND, may_name_model
from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.bench.benchmark import Result
    from slipstream.bench.plan import Limits

MAX_BATCH = 64
FAILED = 1
# Tables need this much where the terminal does not say how wide it is.
WIDTH = 200


def _option(flag: str, metavar: str, help: str) -> Any:
    return typer.Option(flag, metavar=metavar, show_default=False, help=help)


@with_engine_flags_but(
    *("k", "max_k", "drafter", "profile", "prefix_cache", "verify_kernel", "verify_pad", "tile_m")
)
def bench(
    model: Annotated[
        str,
        typer.Argument(
            help=f"{MODEL_HELP} Or random:8b or random:12b: random weights of that size, for "
            "costs, with a scripted drafter."
        ),
    ],
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A minute without peers: fewer prompts, arms and tokens."),
    ] = False,
    k_values: Annotated[
        str | None,
        _option(
            "--k-values",
            "LIST",
            "Arms beside classic decoding. [default: 0,1,2,3,4,8,auto; quick: 0,3,auto]",
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            metavar="NAME|FILE",
            help="built-in, one of its categories, or a file: Spec-Bench's JSON lines, or "
            "OpenAI's messages.",
        ),
    ] = "built-in",
    categories: Annotated[
        str | None, _option("--categories", "LIST", "Only these. [default: all]")
    ] = None,
    prompts: Annotated[
        int | None,
        _option("--prompts", "N", "Prompts of each category at most. [default: 8; quick: 4]"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        _option("--max-tokens", "N", "Tokens of a reply at most. [default: 128; quick: 48]"),
    ] = None,
    batch: Annotated[
        str | None,
        _option("--batch", "LIST", "Prompts answered side by side. [default: 1,4; quick: 1]"),
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            metavar="NAME",
            help="auto, ngram, assistant, the path of one, a draft model, or "
            "scripted:RATE[,RATE...][@SEED], a drafter that is right so often on average.",
        ),
    ] = "auto",
    verify_kernel: Annotated[
        str, _option("--verify-kernel", "LIST", "Compare auto, gemv, multirow, tile.")
    ] = "",
    verify_pad: Annotated[
        str, _option("--verify-pad", "LIST", "Compare auto, off, or row multiples, e.g. off,8.")
    ] = "",
    tile_m: Annotated[str, _option("--tile-m", "LIST", "Compare tiles of so many rows.")] = "",
    peers: Annotated[
        str,
        _option(
            "--peers",
            "LIST",
            "Other engines on the same prompts: llama.cpp, transformers, openvino. [default: none]",
        ),
    ] = "",
    peer_python: Annotated[
        str,
        _option("--peer-python", "PATH", "Python that has the peers. [default: this one]"),
    ] = sys.executable,
    precision: Annotated[
        float | None,
        _option(
            "--precision",
            "PERCENT",
            "Half width wanted of each category's 95 % interval, in a batch of the overall one. "
            "[default: 25; quick: 100]",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        _option(
            "--time-limit",
            "SECONDS",
            "Begin nothing new after that, loading and settling peers included. "
            "[default: 570; quick: 52]",
        ),
    ] = None,
    allow_misleading: Annotated[
        bool,
        typer.Option(
            "--allow-misleading",
            help="Run repeated or random prompts, or too few tokens, and write that into the "
            "result.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        _option("--json", "FILE", "Write everything measured, and print it as the last line."),
    ] = None,
    plot_file: Annotated[Path | None, _option("--plot", "FILE", "Draw a PNG.")] = None,
    **settings: Any,
) -> None:
    """Measure what speculation gains or costs, arm against arm.

    Arms take turns on every prompt and all replies are compared. The last line on stdout is one
    JSON object, unless stdout is a terminal and --json is not given. Exit code 1 says that an
    output differed, 2 that the benchmark would mislead.
    """
    _check_files(json_file, plot_file)
    from slipstream.bench.arms import listed, parse_k_values, parse_variants
    from slipstream.bench.workload import open_workload

    limits = _limits(
        quick,
        prompts=prompts,
        max_tokens=max_tokens,
        batch=batch,
        precision=precision,
        seconds=time_limit,
    )
    config = engine_config(settings)
    names = [] if categories is None else listed(categories, "--categories")
    usual = "0,3,auto" if quick else "0,1,2,3,4,8,auto"
    values = parse_k_values(usual if k_values is None else k_values)
    words = ("auto", "ngram", "assistant")
    beside = drafter.removeprefix(NGRAM_AND)
    if drafter not in words and beside != "assistant" and not may_name_model(beside):
        raise ConfigError(
            f"--drafter must be {', '.join(words)}, a path, a model's name or scripted:RATE, "
            f"got {drafter}",
            hint="e.g. scripted:0.56, or scripted:0.8,0.6",
        )
    result = _run(
        model=model,
        config=config,
        k_values=values,
        variants=parse_variants(config, verify_kernel, verify_pad, tile_m),
        workload=open_workload(workload).limited(limits.prompts, names),
        limits=limits,
        drafter=drafter,
        allow_misleading=allow_misleading,
        peers=_peers(peers),
        peer_python=peer_python,
    )
    try:
        _report(result, json_file, plot_file)
    finally:
        if result.run.mismatches:
            print(f"error: {result.run.mismatches[0]}", file=sys.stderr)
    if result.run.mismatches:
        raise typer.Exit(FAILED)


def _run(**asked: Any) -> Result:
    from slipstream.bench.benchmark import Plan, benchmark

    with progress("bench") as report:
        return benchmark(Plan(**asked), report, lambda line: print(line, flush=True))


def _report(result: Result, json_file: Path | None, plot_file: Path | None) -> None:
    """Write the file, print tables and the JSON line, draw: what fails keeps nothing else back.

    Raises:
        SlipstreamError: a file could not be written; everything else was.
    """
    line = json.dumps(result.as_json(), allow_nan=False)
    failed: list[SlipstreamError] = []
    try:
        if json_file is not None:
            write_text(json_file, line + "\n")
    except SlipstreamError as error:
        failed.append(error)
    try:
        if plot_file is not None:
            from slipstream.bench.plot import plot

            plot(plot_file, result.setup, result.rows)
    except SlipstreamError as error:
        failed.append(error)
    _print_tables(result)
    if json_file is not None or not sys.stdout.isatty():
        print(line, flush=True)
    if failed:
        raise failed[0]


def _print_tables(result: Result) -> None:
    from rich.console import Console

    from slipstream.bench.tables import tables

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for table in tables(result.setup, result.run, result.trials, result.rows):
        console.print(table)


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Fail before anything runs if a file cannot be written."""
    for path in (json_file, plot_file):
        if path is not None:
            check_writable(path)
    if (
        json_file is not None
        and plot_file is not None
        and json_file.resolve() == plot_file.resolve()
    ):
        raise ConfigError(f"--json and --plot must be two files, got {json_file} twice")
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib", hint="pip install 'slipstream[bench]'")


def _limits(quick: bool, **given: Any) -> Limits:
    """Return the limits of a run: what is given, else the defaults.

    Raises:
        ConfigError: one is out of range.
    """
    from slipstream.bench.plan import DEFAULT, QUICK, Limits

    base = QUICK if quick else DEFAULT
    batch, precision = given["batch"], given["precision"]
    limits = Limits(
        max_tokens=_or(given["max_tokens"], base.max_tokens),
        prompts=_or(given["prompts"], base.prompts),
        batches=base.batches if batch is None else _batches(batch),
        seconds=_or(given["seconds"], base.seconds),
        precision=base.precision if precision is None else precision / 100,
    )
    _check("--max-tokens", limits.max_tokens, 2, 1 << 20)
    _check("--prompts", limits.prompts, 1, 1 << 20)
    _check("--precision", 100 * limits.precision, 0.1, 1000)
    _check("--time-limit", limits.seconds, 1, 1e6)
    return limits


def _batches(text: str) -> tuple[int, ...]:
    from slipstream.bench.arms import listed

    out: list[int] = []
    for item in listed(text, "--batch"):
        plain = item.isascii() and item.isdecimal() and len(item) < 9
        if not plain or not 1 <= int(item) <= MAX_BATCH:
            raise ConfigError(f"--batch takes numbers in [1, {MAX_BATCH}], got {item}")
        if int(item) not in out:
            out.append(int(item))
    return tuple(out)


def _peers(text: str) -> list[str]:
    from slipstream.bench.arms import listed
    from slipstream.bench.peers import PEERS

    names = listed(text, "--peers") if text else []
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--peers takes {', '.join(PEERS)}, got {name}")
    return list(dict.fromkeys(names))


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check(flag: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{flag} must be in [{low:g}, {high:g}], got {value:g}")
