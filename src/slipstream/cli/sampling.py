"""Flags that come from `SamplingParams`: one for each field, defaults read from the dataclass.

The engine checks what values mean; only what a flag can say by itself is refused here, before a
model is loaded.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any

import typer

from slipstream.cli.settings import with_options
from slipstream.errors import RequestError
from slipstream.types import SamplingParams

MAX_SEED = 2**64 - 1

# Options by field, in the order of help: the type of a value and what typer is to know of it.
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "max_tokens": (int, typer.Option(min=1, metavar="N", help="Tokens to generate at most.")),
    "temperature": (float, typer.Option(min=0.0, metavar="T", help="0 is greedy.")),
    "seed": (
        int | None,
        typer.Option(
            min=0,
            max=MAX_SEED,
            metavar="S",
            show_default=False,
            help="Seed of the sampler. [default: drawn]",
        ),
    ),
    "top_p": (
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="P",
            help="Choose among the likeliest tokens that together hold this share; 1 keeps all.",
        ),
    ),
    "top_k": (
        int,
        typer.Option(
            min=0, metavar="N", help="Choose among this many of the likeliest tokens; 0 keeps all."
        ),
    ),
    "min_p": (
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="P",
            help="Choose among tokens at least this times as likely as the likeliest.",
        ),
    ),
    "repetition_penalty": (
        float,
        typer.Option(
            metavar="X", help="Above 1, tokens of prompt and reply become less likely; 1 is none."
        ),
    ),
    "presence_penalty": (
        float,
        typer.Option(metavar="X", help="Taken off the logits of tokens that the reply holds."),
    ),
    "frequency_penalty": (
        float,
        typer.Option(metavar="X", help="The same once for each time the reply holds the token."),
    ),
    "min_tokens": (
        int,
        typer.Option(min=0, metavar="N", help="Do not end the reply before it has so many tokens."),
    ),
    "stop": (
        list[str],
        typer.Option(
            metavar="TEXT",
            show_default=False,
            help="End the reply before this text. Repeatable.",
        ),
    ),
    "stop_token_ids": (
        list[int],
        typer.Option(
            "--stop-token-id",
            metavar="ID",
            show_default=False,
            help="End the reply with this token, besides the model's own. Repeatable.",
        ),
    ),
    "ignore_eos": (
        bool,
        typer.Option("--ignore-eos", help="Go on past the model's own end of the reply."),
    ),
}
# Fields without a flag of this kind, and why.
OTHER_FIELDS = {
    "k": "an engine setting as well, whose flag says it for both",
    "max_k": "the same",
    "logprobs": "only JSON shows them: a flag of generate alone",
    "grammar": "two flags of generate alone, one of which names a file",
    "prediction": "a file, a flag of generate alone",
    "n": "one reply is printed",
    "logit_bias": "a mapping",
    "bad_words": "for programs",
    "bad_words_ids": "for programs",
}


def with_sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of `SamplingParams` but `OTHER_FIELDS` to a command."""
    defaults = {item.name: item.default for item in dataclasses.fields(SamplingParams)}
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_flat(defaults[name]),
            annotation=Annotated[kind, option],
        )
        for name, (kind, option) in _OPTIONS.items()
    ]
    return with_options(command, options, last=False)


def sampling_params(settings: dict[str, Any]) -> SamplingParams:
    """Take the sampling flags out of a command's settings.

    Raises:
        RequestError: a value is not finite.
    """
    values = {name: settings.pop(name) for name in _OPTIONS}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name} must be finite, got {value}", param=name)
        if isinstance(value, list):
            values[name] = tuple(value)
    return SamplingParams(**values)


def _flat(default: Any) -> Any:
    """Return a default as typer takes it."""
    return list(default) if isinstance(default, tuple) else default
