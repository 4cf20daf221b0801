"""`slipstream generate`: one reply, streamed as it is made."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.prompts import read_prompt
from slipstream.cli.settings import engine_config, with_engine_flags
from slipstream.cli.status import status
from slipstream.errors import RequestError
from slipstream.types import Reply, SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine

_DEFAULTS = SamplingParams()
MAX_SEED = 2**64 - 1


@with_engine_flags
def generate(
    model: Annotated[str, typer.Argument(help="Name of a pulled model, or path of a model file.")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt.")
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", metavar="FILE", help="Read the prompt there; - is stdin."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            show_default=False,
            help="Put the prompt into the model's chat template, or take it as it is. "
            "[default: chat if the model has a template]",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens to generate at most.")
    ] = _DEFAULTS.max_tokens,
    temperature: Annotated[
        float, typer.Option(min=0.0, metavar="T", help="0 is greedy.")
    ] = _DEFAULTS.temperature,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_SEED,
            metavar="S",
            show_default=False,
            help="Seed of the sampler. [default: drawn, and reported with --json]",
        ),
    ] = _DEFAULTS.seed,
    json_output: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object instead of the text."),
    ] = False,
    **settings: Any,
) -> None:
    """Generate a reply and say on stderr what speculation gained."""
    if not math.isfinite(temperature):
        raise RequestError(f"temperature must be finite, got {temperature}", param="temperature")
    config = engine_config(settings)
    text = read_prompt(prompt, prompt_file)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)

    from slipstream.engine.load import load

    with status(f"loading {model}"):
        engine = load(model, config)
    reply = _stream(engine, _prompt_for(engine, text, chat), params, echo=not json_output)
    if json_output:
        # ASCII, so that no character of the text can pass for the end of the line.
        print(json.dumps(dataclasses.asdict(reply), allow_nan=False), flush=True)
    print(closing_line(reply), file=sys.stderr)


def closing_line(reply: Reply) -> str:
    """Say in one line how fast a reply was and what speculation had to do with it."""
    report = reply.speculation
    parts = [
        f"{reply.usage.completion_tokens} tokens, {reply.timing.decode_tokens_per_s:.1f} tok/s"
    ]
    if report.acceptance_length is not None:
        parts.append(f"acceptance length {report.acceptance_length:.2f}")
    parts.append(f"rounds: {report.rounds} speculative and {report.classic_rounds} classic")
    named = report.reason.startswith(report.verdict)
    return f"{', '.join(parts)}; {'' if named else report.verdict + ': '}{report.reason}"


def _prompt_for(engine: Engine, text: str, chat: bool | None) -> str | list[dict[str, str]]:
    """Return the text as it is, or as a user's message for the chat template."""
    wants_chat = engine.has_chat_template if chat is None else chat
    return [{"role": "user", "content": text}] if wants_chat else text


def _stream(engine: Engine, prompt: Any, params: SamplingParams, *, echo: bool) -> Reply:
    """Run a request to its end, writing text to stdout as it becomes final if `echo`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="")
    reply: Reply | None = None
    with closing(engine.stream(prompt, params)) as chunks:
        for chunk in chunks:
            if echo:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            reply = chunk.reply or reply
    assert reply is not None, "a stream ends with its reply"
    if echo and sys.stdout.isatty():
        sys.stdout.write("\n")
    return reply
