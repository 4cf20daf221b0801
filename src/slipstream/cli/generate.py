"""`slipstream generate`: one reply, streamed as it is made."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.output import check_writable, write_text
from slipstream.cli.prompts import read_prompt, read_text
from slipstream.cli.sampling import sampling_params, with_sampling_flags
from slipstream.cli.settings import MODEL_HELP, engine_config, with_engine_flags
from slipstream.cli.status import status
from slipstream.cli.view import Ink, ReplyView, closing_line, print_faint
from slipstream.errors import RequestError
from slipstream.types import DetailedReply, Grammar, Reply, SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.policy.record import TraceRecorder


@with_engine_flags
@with_sampling_flags
def generate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
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
    json_output: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object instead of the text."),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            show_default=False,
            help="Report each token's log-probability and those of N alternatives; needs --json. "
            "[default: none]",
        ),
    ] = None,
    json_object: Annotated[
        bool,
        typer.Option("--json-object", help="Have the model reply with a JSON object."),
    ] = False,
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema",
            metavar="FILE",
            show_default=False,
            help="Have the model reply with JSON that satisfies this schema.",
        ),
    ] = None,
    prediction: Annotated[
        str | None,
        typer.Option(
            "--prediction",
            metavar="FILE",
            show_default=False,
            help="Draft from this text, which the reply is expected to resemble.",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FILE",
            show_default=False,
            help="Write what each round drafted, gained and took, for slipstream simulate.",
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Generate a reply and say on stderr what speculation gained.

    On a terminal, accepted draft tokens are marked.
    """
    if logprobs is not None and not json_output:
        raise RequestError("--logprobs are shown with --json only", param="logprobs")
    params = dataclasses.replace(
        sampling_params(settings),
        logprobs=logprobs,
        grammar=_grammar(json_object, json_schema),
        prediction=None if prediction is None else read_text(prediction, "prediction"),
    )
    config = engine_config(settings)
    text = read_prompt(prompt, prompt_file)

    from slipstream.engine.load import load

    if record is not None:
        check_writable(record)
    with status(f"loading {model}"):
        engine = load(model, config)
    recorder = None if record is None else trace_recorder(engine, model)
    with engine:
        reply = _stream(engine, _prompt_for(engine, text, chat), params, echo=not json_output)
    if json_output:
        # ASCII, so that no character of the text can pass for the end of the line.
        print(json.dumps(_as_json(reply), allow_nan=False), flush=True)
    drawn = params.temperature > 0 and params.seed is None
    print_faint(closing_line(reply, seed_matters=drawn), sys.stderr)
    if record is not None and recorder is not None:
        write_text(record, recorder.as_json())


def _grammar(json_object: bool, schema_file: str | None) -> Grammar | None:
    """Return the grammar that the flags ask for.

    Raises:
        RequestError: both flags are given, or the file cannot be read.
    """
    if schema_file is None:
        return Grammar(kind="json_object") if json_object else None
    if json_object:
        raise RequestError(
            "a reply follows either --json-object or --json-schema, got both", param="grammar"
        )
    return Grammar(kind="json_schema", definition=read_text(schema_file, "grammar"))


def trace_recorder(engine: Engine, model: str) -> TraceRecorder:
    """Return a recorder of all steps that an engine will run."""
    from slipstream.policy.record import TraceRecorder

    drafter = engine.config.drafter if engine.pairing.make_drafters else "no drafter"
    recorder = TraceRecorder(f"{model}, {drafter}, k {engine.config.k}")
    engine.observers.append(recorder.observe)
    return recorder


def _prompt_for(engine: Engine, text: str, chat: bool | None) -> str | list[dict[str, str]]:
    """Return the text as it is, or as a user's message for the chat template."""
    wants_chat = engine.has_chat_template if chat is None else chat
    return [{"role": "user", "content": text}] if wants_chat else text


def _as_json(reply: Reply) -> dict[str, Any]:
    """Return the object that --json prints; log-probabilities have names there."""
    value = dataclasses.asdict(reply)
    if isinstance(reply, DetailedReply) and reply.logprobs is not None:
        value["logprobs"] = [entry._asdict() for entry in reply.logprobs]
    return value


def _stream(engine: Engine, prompt: Any, params: SamplingParams, *, echo: bool) -> Reply:
    """Run a request to its end, writing text to stdout as it becomes final if `echo`."""
    view = ReplyView(sys.stdout, engine) if echo else None
    reply: Reply | None = None
    with closing(engine.stream(prompt, params)) as chunks:
        for chunk in chunks:
            if view is not None:
                view.show(chunk)
            reply = chunk.reply or reply
    assert reply is not None, "a stream ends with its reply"
    if view is not None and sys.stdout.isatty():
        view.end_line()
        if view.any_marked and sys.stderr.isatty():
            print(Ink.of(sys.stderr).legend(), file=sys.stderr)
    return reply
