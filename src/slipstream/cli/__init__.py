"""The `slipstream` command.

Each command has a file of its own, which imports engine and torch only once it runs, so that
`slipstream --help` answers at once. Data goes to stdout, everything else to stderr; how errors
become messages and exit codes is decided in `failures`, for all commands alike.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from slipstream import __version__
from slipstream.cli import bench, chat, distill, generate, info, profile, pull, serve, simulate
from slipstream.cli.failures import report_failure

app = typer.Typer(
    name="slipstream",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(pull.pull)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(info.info)
app.command()(profile.profile)
app.command()(bench.bench)
app.command()(simulate.simulate)
app.command()(distill.distill)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the Python traceback of an error.")
    ] = False,
) -> None:
    """Serve open-weight language models, faster, with speculative decoding.

    What the drafter does changes the clock, never the text. Exit codes: 0 done, 1 failed, 2 bad
    usage, 130 interrupted.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        args: words after the program's name; `sys.argv` by default.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the process's life
    logging.basicConfig(format="%(levelname)s: %(message)s")  # warnings and worse, to stderr
    words = list(sys.argv[1:] if args is None else args)
    try:
        code = app(words, prog_name="slipstream", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        # Before the first command only our own options stand, so this needs no parsed context.
        return report_failure(error, traceback=words[:1] == ["--traceback"])
    return code if isinstance(code, int) else 0
