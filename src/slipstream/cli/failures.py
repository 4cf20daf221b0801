"""From an exception to a message on stderr and an exit code: one place for all commands.

    0    done
    1    failed: the model, the machine, a closed pipe or a fault of our own
    2    bad usage: a flag, a variable, a prompt; nothing was run
    130  interrupted with Ctrl-C

An error reads `error: what is wrong`, then perhaps `hint: what to do`. A traceback is printed only
when asked for.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import traceback as traceback_module

import typer

from slipstream.errors import ConfigError, RequestError, SlipstreamError

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count


def report_failure(error: BaseException, *, traceback: bool) -> int:
    """Print what went wrong on stderr and return the exit code.

    Args:
        error: what a command raised.
        traceback: print the traceback as well.
    """
    if isinstance(error, BrokenPipeError):
        _silence_stdout()
        return FAILED
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if traceback:
        traceback_module.print_exception(error)
    if isinstance(error, SlipstreamError):
        _print(error.message, error.hint)
        return BAD_USAGE if isinstance(error, ConfigError | RequestError) else FAILED
    if isinstance(error, typer.TyperException):
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error, file=sys.stderr)
        else:
            _print(*_usage_message(error))
        return getattr(error, "exit_code", BAD_USAGE)
    if isinstance(error, OSError) and error.strerror:  # e.g. no space left for the output
        _print(f"{error.filename}: {error.strerror}" if error.filename else error.strerror, None)
        return FAILED
    summary = f"unexpected {type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
    _print(summary, "put --traceback before the command to see where: slipstream --traceback ...")
    return FAILED


def _usage_message(error: typer.TyperException) -> tuple[str, str]:
    """Return message and hint of a usage error; an unknown flag or command names the nearest."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "slipstream"
    fallback = f"see {path} --help"
    unknown = getattr(error, "option_name", None)
    if unknown is not None and type(error).__name__ == "NoSuchOption":
        known = [flag for item in context.command.params for flag in item.opts] if context else []
        return f"no such flag: {unknown}", _nearest(unknown, [*known, "--help"], fallback)
    text = str(getattr(error, "format_message", error.__str__)()).strip()
    text = " ".join(text.split())
    commands = getattr(context.command, "commands", None) if context else None
    if commands and text.startswith("No such command"):
        name = text.split("'")[1] if "'" in text else text
        return f"no such command: {name}", _nearest(name, list(commands), fallback)
    return text[:1].lower() + text[1:].rstrip("."), fallback


def _nearest(word: str, known: list[str], fallback: str) -> str:
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {match[0]}?" if match else fallback


def _print(message: str, hint: str | None) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError):  # not a file, e.g. under a test runner
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
