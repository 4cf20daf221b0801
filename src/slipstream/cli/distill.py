"""`slipstream distill`: train an assistant drafter for a model."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.settings import MODEL_HELP, with_options
from slipstream.cli.status import progress
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.models.loading import ModelFile
    from slipstream.train.distill import Distillation, Judgement
    from slipstream.train.evaluate import Prompt
    from slipstream.train.trainer import Trainer

_STAGES = ("all", "data")


def distill(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the checkpoint.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            show_default=False,
            help="Folder of the conversations; all that it holds are used. [default: OUT/data]",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="NAME|FILE",
            show_default=False,
            help="Judge the checkpoint on a workload, as bench --workload takes it.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="auto|cpu|cuda", help="Where to train: a GPU, if any."),
    ] = "auto",
    stage: Annotated[
        str,
        typer.Option(
            "--stage", metavar="all|data", help="data writes the conversations and no more."
        ),
    ] = "all",
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
    **settings: Any,
) -> None:
    """Train an assistant: a head that drafts from the model's own KV.

    The model writes the text itself. A run that was stopped goes on where it was when it is started
    again with the same settings.
    """
    from slipstream.models.loading import open_model, resolve_model

    for name, value, allowed in (
        ("stage", stage, _STAGES),
        ("device", device, ("auto", "cpu", "cuda")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value}")
    recipe = _recipe(settings)
    file = open_model(resolve_model(model))
    asked = _prompts(file, prompts)
    from slipstream.train.distill import Distillation, check_out

    check_out(out, recipe, file.arch)
    run = Distillation(file, recipe, out, device=device, data=data)
    with progress(file.name) as report:
        run.write_text(report)
        if stage == "data":
            print(run.data)
            return
        trainer = run.train(report, _say)
        judged = _judge(run, trainer, asked, report)
    if json_output:
        print(json.dumps(_as_json(trainer, judged), allow_nan=False))
        return
    for line in _table(trainer, judged):
        print(line)
    print(out)


def _say(trainer: Trainer) -> None:
    """Say on stderr what the held-out text says."""
    last = trainer.history[-1]
    length = last["acceptance_length"]
    words = (
        "no greedy replies are held out" if length is None else f"acceptance length {length:.3f}"
    )
    print(f"step {last['step']}: loss {last['loss']:.4f}, {words}", file=sys.stderr, flush=True)


def _judge(
    run: Distillation, trainer: Trainer, asked: list[Prompt], report: Any
) -> list[Judgement]:
    if not asked:
        return []
    return [
        run.judge(trainer, asked, temperature, lambda part: report("answering the prompts", part))
        for temperature in (0.0, 1.0)
    ]


def _recipe(settings: dict[str, Any]) -> Any:
    from slipstream.train.recipe import Recipe

    given = {name: value for name, value in settings.items() if value is not None}
    return Recipe(**given)


def _prompts(file: ModelFile, name: str | None) -> list[Prompt]:
    if name is None:
        return []
    from slipstream.bench.workload import open_workload
    from slipstream.train.evaluate import Prompt
    from slipstream.train.turns import whole_turn

    return [
        Prompt(category=item.category, ids=whole_turn(file, item.messages(0, [])))
        for item in open_workload(name).conversations
    ]


def _as_json(trainer: Trainer, judged: list[Judgement]) -> dict[str, Any]:
    return {
        "steps": trainer.step,
        "history": trainer.history,
        "prompts": [
            {
                "temperature": item.temperature,
                "overall": {
                    k: dataclasses.asdict(item.overall(k)) for k in next(iter(item.rounds.values()))
                },
                "categories": {
                    name: {k: list(rounds.accepted) for k, rounds in own.items()}
                    for name, own in item.rounds.items()
                },
            }
            for item in judged
        ],
    }


def _table(trainer: Trainer, judged: list[Judgement]) -> list[str]:
    last = trainer.history[-1]
    chances = ", ".join(f"{chance:.2f}" for chance in last["by_position"])
    lines = [
        f"held-out replies: acceptance length {last['acceptance_length'] or 0:.2f} at k = 4, "
        f"chances of acceptance of the drafts {chances or '-'}"
    ]
    for item in judged:
        ks = list(next(iter(item.rounds.values())))
        lines.append(f"acceptance length at temperature {item.temperature:g}, by k")
        lines.append(f"{'':<16}" + "".join(f"{k:>6}" for k in ks))
        rows = {**item.rounds, "overall": {k: item.overall(k) for k in ks}}
        for name, own in rows.items():
            cells = (own[k].acceptance_length for k in ks)
            lines.append(
                f"{name:<16}" + "".join("     -" if c is None else f"{c:6.2f}" for c in cells)
            )
    return lines


def _options() -> list[inspect.Parameter]:
    from slipstream.train.recipe import Recipe

    return [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=item.default,
            annotation=Annotated[
                type(item.default),
                typer.Option("--" + item.name.replace("_", "-"), help=_sentence(item)),
            ],
        )
        for item in dataclasses.fields(Recipe)
    ]


def _sentence(item: dataclasses.Field[Any]) -> str:
    text: str = item.metadata["help"]
    return text[:1].upper() + text[1:] + "."


with_options(distill, _options(), last=True)
