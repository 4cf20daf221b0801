"""`slipstream chat`: a conversation at a terminal, or one turn a line from a pipe."""

from __future__ import annotations

import dataclasses
import difflib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.conversation import Conversation
from slipstream.cli.sampling import sampling_params, with_sampling_flags
from slipstream.cli.settings import MODEL_HELP, engine_config, with_engine_flags
from slipstream.cli.status import status
from slipstream.cli.turns import TypedTurns, piped_turns
from slipstream.cli.view import Ink, ReplyView, closing_line, print_faint
from slipstream.config import parse_k
from slipstream.errors import ConfigError, RequestError, SlipstreamError
from slipstream.types import Chunk, Reply, SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine

_COMMANDS = {
    "/reset": "forget the conversation, but not the system message",
    "/system TEXT": "set the system message; without TEXT, go back to the model's own",
    "/k VALUE": "drafted tokens a round from now on: auto, off or a number; without VALUE, show it",
    "/help": "list the commands",
    "/exit": "leave; so does Ctrl-D",
}
_FOOTNOTE = "Ctrl-C stops a reply. A text that begins with / is sent with // in front."


@with_engine_flags
@with_sampling_flags
def chat(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    system: Annotated[
        str, typer.Option("--system", metavar="TEXT", show_default=False, help="System message.")
    ] = "",
    **settings: Any,
) -> None:
    """Talk with a model; accepted draft tokens are marked.

    At a terminal, /help lists what else can be typed. Piped, each line of stdin is a turn, and
    stdout gets the replies as plain text.
    """
    params = sampling_params(settings)
    config = engine_config(settings)

    from slipstream.engine.load import load

    with status(f"loading {model}"):
        engine = load(model, config)
    if not engine.has_chat_template:
        raise RequestError(
            f"chat needs a chat template, and {model} has none",
            hint="slipstream generate --raw continues a text",
        )
    dialogue = Chat(engine, params, system)
    with engine:
        if sys.stdin.isatty():
            dialogue.talk(model)
        else:
            for text in piped_turns():
                if not dialogue.take(text):
                    break


class Chat:
    """One conversation and what is set for it."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str = "") -> None:
        self._engine = engine
        self._params = params
        self._conversation = Conversation(engine, system)

    def talk(self, model: str) -> None:
        """Take turns from a terminal until the user leaves; errors are told and survived."""
        self._greet(model)
        turns = TypedTurns()
        while True:
            try:
                text = turns.ask()
                if text.strip() and not self.take(text, stoppable=True):
                    return
                print(file=sys.stderr)
            except EOFError:
                print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                _say("\nCtrl-D or /exit leaves\n")
            except SlipstreamError as error:
                print(f"error: {error}\n", file=sys.stderr)

    def take(self, text: str, *, stoppable: bool = False) -> bool:
        """Do what one turn asks for.

        Args:
            text: a message or a command.
            stoppable: whether Ctrl-C ends the reply rather than the program.

        Returns:
            Whether the conversation goes on.

        Raises:
            SlipstreamError: the turn could not be served; the conversation is as before.
        """
        if text.startswith("/") and not text.startswith("//"):
            return self._command(text)
        text = text.removeprefix("/") if text.startswith("//") else text
        reply = self._reply(text, stoppable)
        if reply.text:
            self._conversation.exchanges.append((text, reply.text))
        _say(closing_line(reply))
        return True

    def _reply(self, text: str, stoppable: bool) -> Reply:
        """Stream a reply to stdout."""
        view = ReplyView(sys.stdout, self._engine)
        reply: Reply | None = None
        with _ctrl_c(stoppable) as wants_stop:
            request_id = self._conversation.submit(text, self._params, _say)
            try:
                while reply is None:
                    for output in self._engine.step():
                        if output.request_id == request_id:
                            reply = _shown(output.chunk, view)
                    if reply is None and wants_stop():
                        (reply,) = self._engine.cancel(request_id)
            finally:
                self._engine.cancel(request_id)  # if it is still there
                view.end_line()
        return reply

    def _command(self, line: str) -> bool:
        """Run a command and return whether the conversation goes on."""
        name, _, value = line.strip().partition(" ")
        value = value.strip()
        if name == "/exit":
            return False
        known: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/system": self._set_system,
            "/k": self._set_k,
            "/help": _help,
        }
        if name not in known:
            near = difflib.get_close_matches(name, [*known, "/exit"], n=1, cutoff=0.5)
            raise RequestError(
                f"no such command: {name}",
                hint=f"did you mean {near[0]}?" if near else "/help lists them",
            )
        known[name](value)
        return True

    def _reset(self, value: str) -> None:
        self._conversation.exchanges.clear()
        _say("the conversation is forgotten")

    def _set_system(self, value: str) -> None:
        self._conversation.system = value
        _say("the system message is set" if value else "the system message is the model's own")

    def _set_k(self, value: str) -> None:
        if value:
            k = parse_k(value)
            own = self._engine.config.k
            if isinstance(own, int) and isinstance(k, int) and k > own:
                raise ConfigError(f"k must be in [0, {own}] with --k {own}, got {k}")
            self._params = dataclasses.replace(self._params, k=k)
        now = self._engine.config.k if self._params.k is None else self._params.k
        _say(f"k is {now}")

    def _greet(self, model: str) -> None:
        target = self._engine.target
        _say(
            f"{model} on {target.backend.name} ({target.backend.reason}), "
            f"context {target.max_model_len} tokens; /help lists commands"
        )
        if sys.stdout.isatty():
            print(Ink.of(sys.stdout).legend(), end="\n\n", flush=True)


def _shown(chunk: Chunk, view: ReplyView) -> Reply | None:
    """Show a chunk and return its reply.

    Raises:
        SlipstreamError: the request could not go on.
    """
    view.show(chunk)
    if chunk.error is not None:
        raise chunk.error
    return chunk.reply


def _help(value: str) -> None:
    width = max(map(len, _COMMANDS))
    lines = [f"{name:<{width}}  {meaning}" for name, meaning in _COMMANDS.items()]
    _say("\n".join([*lines, _FOOTNOTE]))


def _say(text: str) -> None:
    """Print something that is not the model's, on stderr."""
    print_faint(text, sys.stderr)


@contextmanager
def _ctrl_c(stoppable: bool) -> Iterator[Callable[[], bool]]:
    """Make the block's first Ctrl-C a wish that it can ask for; the second one interrupts.

    A step is thus never left half done by a user who only wants the reply to end.
    """
    if not stoppable:
        yield lambda: False
        return
    wished = False

    def wish(*_: object) -> None:
        nonlocal wished
        if wished:
            raise KeyboardInterrupt
        wished = True

    before = signal.signal(signal.SIGINT, wish)
    try:
        yield lambda: wished
    finally:
        signal.signal(signal.SIGINT, before)
