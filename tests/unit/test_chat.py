"""`slipstream chat` from a pipe and on a terminal, around a fake model."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.cli.conversation import Conversation
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.errors import CapacityError, RequestError
from slipstream.types import Output, SamplingParams
from tests.fake_model import continuation
from tests.fake_talker import loader, talker
from tests.terminal import converse

MARK, OFF = "\x1b[32m", "\x1b[0m"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLIPSTREAM_"):
            monkeypatch.delenv(name)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    module, made = loader()
    monkeypatch.setitem(sys.modules, "slipstream.engine.load", module)
    yield made
    for engine in made:
        assert engine.num_requests == 0
        assert engine.pages.num_taken == 0


@pytest.fixture
def chat(engines: list[Engine], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Pipe turns to `slipstream chat`; return exit code, stdout and stderr."""

    def pipe(turns: str | bytes, *words: str) -> tuple[int, str, str]:
        data = turns if isinstance(turns, bytes) else turns.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = main(["chat", "tiny", "--max-tokens", "6", *words])
        return code, *capfd.readouterr()

    return pipe


def said(prompt: str, count: int = 6) -> str:
    """Return what the fake model says to a rendered prompt."""
    ids = [ord(c) % 97 for c in prompt]
    return "".join(f"<{i}>" for i in continuation(ids, count))


def test_each_line_is_a_turn_and_stdout_holds_the_replies(chat) -> None:
    code, out, err = chat("hi\n\nyou\r\n")
    first = said("u:hi\na:")
    second = said(f"u:hi\na:{first}\nu:you\na:")
    assert (code, out) == (0, f"{first}\n{second}\n")
    assert err.count("tok/s") == 2
    assert "\x1b" not in out + err


def test_reset_forgets_the_conversation_and_keeps_the_system_message(chat) -> None:
    code, out, _ = chat("hi\n/reset\nyou\n", "--system", "be brief")
    expected = [said(f"s:be brief\nu:{text}\na:") for text in ("hi", "you")]
    assert (code, out.splitlines()) == (0, expected)


def test_system_sets_replaces_and_removes_the_system_message(chat) -> None:
    turns = "/system one\nhi\n/reset\n/system two\nhi\n/reset\n/system\nhi\n"
    code, out, _ = chat(turns)
    prompts = ("s:one\nu:hi\na:", "s:two\nu:hi\na:", "u:hi\na:")
    assert (code, out.splitlines()) == (0, [said(prompt) for prompt in prompts])


def test_k_changes_the_rounds_and_not_the_text(chat) -> None:
    _, out, err = chat("/k off\nhi\n/reset\n/k 3\nhi\n/k\n")
    first, second = out.splitlines()
    assert first == second
    assert "k is off" in err
    assert "off: no drafting was asked for" in err
    assert "fixed: k = 3 was asked for" in err
    assert err.splitlines()[-1] == "k is 3"


def test_two_slashes_send_a_text_that_begins_with_one(chat) -> None:
    code, out, _ = chat("//bin/sh\n")
    assert (code, out) == (0, said("u:/bin/sh\na:") + "\n")


def test_exit_leaves_the_rest_of_the_pipe_unread(chat) -> None:
    code, out, _ = chat("/exit\nhi\n")
    assert (code, out) == (0, "")


def test_help_names_every_command(chat) -> None:
    code, out, err = chat("/help\n")
    assert (code, out) == (0, "")
    for command in ("/reset", "/system", "/k", "/help", "/exit"):
        assert command in err


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ("/rest\n", "error: no such command: /rest\nhint: did you mean /reset?"),
        ("/k 99\n", "error: k must be auto, off or in [0, 15], got 99"),
        ("/k x\n", "error: k must be auto, off or in [0, 15], got x"),
        (b"ok\ncaf\xe9\n", "error: line 2 of stdin is not UTF-8"),
        (b"a\0b\n", "error: the prompt from line 1 of stdin holds a NUL"),
    ],
)
def test_a_script_ends_at_its_first_error_with_exit_code_2(chat, turns, message: str) -> None:
    code, _, err = chat(turns)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_k_above_the_engine_s_own_is_refused_at_once(chat) -> None:
    code, _, err = chat("/k 5\n", "--k", "4")
    assert code == 2
    assert "k must be in [0, 4] with --k 4, got 5" in err


def test_a_full_context_drops_the_oldest_exchanges_and_says_so(chat) -> None:
    code, out, err = chat("first\nsecond\nthird\n", "--max-model-len", "85")
    first = said("u:first\na:")
    second = said(f"u:first\na:{first}\nu:second\na:")
    # The third prompt has no room for the first exchange.
    third = said(f"u:second\na:{second}\nu:third\na:")
    assert (code, out.splitlines()) == (0, [first, second, third])
    assert err.count("the context of 85 tokens is full: the oldest exchange is forgotten") == 1


def test_a_text_too_long_by_itself_is_refused_and_forgets_nothing() -> None:
    engine = talker(EngineConfig(max_model_len=100))
    conversation = Conversation(engine)
    conversation.exchanges += [("a", "b"), ("c", "d")]
    with pytest.raises(RequestError, match="must fit the context of 100"):
        conversation.submit("x" * 200, SamplingParams(), print)
    assert conversation.exchanges == [("a", "b"), ("c", "d")]
    assert engine.num_requests == 0


@pytest.mark.parametrize("length", range(1, 100, 7))
def test_what_is_kept_leaves_room_for_a_reply_or_is_the_text_alone(length: int) -> None:
    engine = talker(EngineConfig(max_model_len=100))
    conversation = Conversation(engine)
    conversation.exchanges += [("x" * 10, "y" * 10)] * 5
    told: list[str] = []
    request_id = conversation.submit("z" * min(length, 90), SamplingParams(), told.append)
    (reply,) = engine.cancel(request_id)
    assert reply.usage.prompt_tokens <= 75 or not conversation.exchanges
    assert len(told) == (len(conversation.exchanges) < 5)


def test_a_model_without_a_template_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _ = loader(template=False)
    monkeypatch.setitem(sys.modules, "slipstream.engine.load", module)
    assert main(["chat", "tiny"]) == 2
    assert "error: chat needs a chat template" in capsys.readouterr().err


def on_terminal(steps: list[tuple[str, str]], *words: str, step_s: float = 0.0, **variables: str):
    program = (
        "import sys; from tests.fake_talker import run; "
        f"sys.exit(run(['chat', 'tiny', *{words!r}], step_s={step_s}))"
    )
    return converse(program, steps, **variables)


def test_a_terminal_shows_prompt_legend_marks_and_closing_line() -> None:
    screen, code = on_terminal([("> ", "hello\r"), ("tok/s", ""), ("> ", "\x04")])
    assert code == 0
    assert f"{MARK}like this{OFF}" in screen
    assert screen.count("like this") == 1
    assert re.search(rf"<\d+>{re.escape(MARK)}<\d+>", screen)
    assert "acceptance length" in screen
    assert "Traceback" not in screen


def test_the_marked_text_without_its_marks_is_the_plain_text() -> None:
    screens = [
        on_terminal([("> ", "hello\r"), ("tok/s", ""), ("> ", "/exit\r")], TERM=term)[0]
        for term in ("xterm", "dumb")
    ]
    marked, plain = ("".join(re.findall(r"<\d+>", screen)) for screen in screens)
    assert MARK in screens[0]
    assert MARK not in screens[1]
    assert marked == plain == said("u:hello\na:", 256)


def test_ctrl_c_stops_the_reply_and_ctrl_c_at_the_prompt_does_not_leave() -> None:
    steps = [
        ("> ", "hello\r"),
        ("<", "\x03"),
        ("(stopped)", ""),
        ("> ", "\x03"),
        ("Ctrl-D or /exit leaves", ""),
        ("> ", "again\r"),
        ("<", "\x03"),
        ("(stopped)", ""),
        ("> ", "\x04"),
    ]
    screen, code = on_terminal(steps, "--max-tokens", "4000", step_s=0.01)
    assert code == 0
    assert "Traceback" not in screen


def test_errors_at_the_prompt_are_told_and_survived() -> None:
    steps = [
        ("> ", "/nonsense\r"),
        ("error: no such command", ""),
        ("> ", "x" * 300 + "\r"),
        ("error: prompt + 1 token must fit", ""),
        ("> ", "hi\r"),
        ("tok/s", ""),
        ("> ", "/exit\r"),
    ]
    screen, code = on_terminal(steps, "--max-model-len", "200", "--max-tokens", "5")
    assert code == 0
    assert "Traceback" not in screen


def test_a_reply_that_fails_is_told_and_not_remembered(
    chat,  # type: ignore[no-untyped-def]
    engines: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: Engine) -> list[Output]:
        raise CapacityError("no page left")

    monkeypatch.setattr(Engine, "step", broken)
    code, out, err = chat("hi\n")
    assert (code, out, err) == (1, "", "error: no page left\n")
    (engine,) = engines
    assert engine.num_requests == 0


def test_a_bracketed_paste_of_several_lines_is_one_turn() -> None:
    readline = pytest.importorskip("readline")
    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("libedit takes no bracketed paste")
    paste = "\x1b[200~one\ntwo\n\nthree\x1b[201~\r"
    steps = [("> ", paste), ("tok/s", ""), ("> ", "/exit\r")]
    screen, code = on_terminal(steps, "--max-tokens", "6")
    assert code == 0
    assert screen.count("tok/s") == 1
    assert said("u:one\ntwo\n\nthree\na:") in screen.replace(MARK, "").replace(OFF, "")


def test_an_unbracketed_paste_is_one_turn_where_the_editor_takes_no_brackets() -> None:
    program = (
        "import sys; from slipstream.cli import turns; turns._brackets_pastes = lambda: False; "
        "from tests.fake_talker import run; sys.exit(run(['chat', 'tiny', '--max-tokens', '6']))"
    )
    steps = [("> ", "one\rtwo\r\rthree\r"), ("tok/s", ""), ("> ", "/exit\r")]
    screen, code = converse(program, steps)
    assert code == 0
    assert screen.count("tok/s") == 1
    assert said("u:one\ntwo\n\nthree\na:") in screen.replace(MARK, "").replace(OFF, "")


def test_replies_alone_go_to_a_file_while_the_prompt_stays_on_the_terminal(tmp_path: Path) -> None:
    target = tmp_path / "replies"
    program = (
        f"import sys; sys.stdout = open({str(target)!r}, 'w'); "
        "from tests.fake_talker import run; sys.exit(run(['chat', 'tiny', '--max-tokens', '6']))"
    )
    screen, code = converse(program, [("> ", "hi\r"), ("tok/s", ""), ("> ", "\x04")])
    assert code == 0
    assert target.read_text() == said("u:hi\na:") + "\n"
    assert "<" not in screen
