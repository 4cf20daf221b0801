"""What a reply looks like: marks on the accepted drafts, nothing that steers the terminal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cli.view import Ink, Marks, ReplyView, harmless
from slipstream.models.loading.detokenizer import Detokenizer
from slipstream.types import Chunk
from tests.terminal import ROOT, converse

# Tokens are single bytes or short texts, so that characters straddle tokens.
PIECES = [*(bytes([b]) for b in (0x61, 0x0A, 0xC3, 0xA4, 0xF0, 0x9F, 0x98, 0x80, 0xFF)), b"the "]
ROUND = st.tuples(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=6), st.integers(0))


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def detokenizer() -> Detokenizer:
    return Detokenizer(lambda token_id: PIECES[token_id])


def spelled(*pieces: str) -> Any:
    """Return an engine whose tokenizer spells id i as the i-th piece."""
    texts = [piece.encode() for piece in pieces]
    return SimpleNamespace(
        tokenizer=SimpleNamespace(detokenizer=lambda: Detokenizer(lambda i: texts[i]))
    )


def chunk(text: str, token_ids: list[int], accepted: int, *, last: bool = False) -> Chunk:
    reply: Any = object() if last else None
    return Chunk(text=text, token_ids=token_ids, accepted=accepted, reply=reply)


@given(st.lists(ROUND, max_size=12), st.integers(0, 3))
def test_marked_runs_join_to_the_text_and_mark_the_drafted_characters(
    rounds: list[tuple[list[int], int]], num_held: int
) -> None:
    # The engine's side: a text that is held back by some characters, as before a stop string.
    whole, spells, held = detokenizer(), detokenizer(), ""
    marks, shown, expected = Marks(detokenizer()), [], []
    text = ""
    for index, (ids, accepted) in enumerate(rounds):
        accepted %= len(ids) + 1
        last = index == len(rounds) - 1
        held += whole.push(ids) + (whole.finish() if last else "")
        cut = len(held) if last else max(0, len(held) - num_held)
        piece, held = held[:cut], held[cut:]
        text += piece
        for place, token_id in enumerate(ids):
            expected += [(c, place < accepted) for c in spells.push([token_id])]
        runs = marks.split(chunk(piece, ids, accepted, last=last))
        assert "".join(run for run, _ in runs) == piece
        shown += [(c, mark) for run, mark in runs for c in run]
    expected += [(c, False) for c in spells.finish()]
    assert shown == expected


def test_text_cut_short_is_shown_as_it_came() -> None:
    marks = Marks(Detokenizer(lambda i: b"stop here"[i : i + 1]))
    assert marks.split(chunk("stop", [*range(9)], 9, last=True)) == [("stop", True)]


def test_text_that_the_tokens_do_not_spell_is_shown_without_marks() -> None:
    marks = Marks(Detokenizer(lambda _: b"x"))
    assert marks.split(chunk("other", [0, 0], 2)) == [("other", False)]
    assert marks.split(chunk("x", [0], 1)) == [("x", True)]


@pytest.mark.usefixtures("colours")
def test_accepted_drafts_are_coloured_on_a_terminal() -> None:
    screen = Screen()
    view = ReplyView(screen, spelled("one ", "two ", "three"))
    view.show(chunk("one two three", [0, 1, 2], 2))
    assert screen.getvalue() == "\x1b[32mone two \x1b[0mthree"
    assert view.any_marked


def test_a_pipe_gets_the_text_and_nothing_else() -> None:
    pipe = io.StringIO()
    view = ReplyView(pipe, spelled())  # no tokenizer is asked
    view.show(chunk("\x1b[2Jraw\r\n", [0, 1], 2))
    assert pipe.getvalue() == "\x1b[2Jraw\r\n"


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("TERM", "")])
def test_a_plain_terminal_gets_no_escape_sequences(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    screen = Screen()
    ReplyView(screen, spelled("one", "\x1b[2J")).show(chunk("one\x1b[2J", [0, 1], 1))
    assert screen.getvalue() == "one␛[2J"


@pytest.mark.usefixtures("colours")
def test_no_color_underlines_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    ReplyView(screen, spelled("one", "two")).show(chunk("onetwo", [0, 1], 1))
    assert screen.getvalue() == "\x1b[4mone\x1b[0mtwo"


@pytest.mark.usefixtures("colours")
@pytest.mark.parametrize(
    "text",
    [
        "\x1b]0;title\x07",  # set the window's title
        "\x1b[6n",  # make the terminal answer as if typed
        "\x9b2J",  # an 8-bit control sequence
        "fine\rover",  # write over what stands there
        "a\x08b\x7f",
        "\x00",
    ],
)
def test_no_reply_can_steer_the_terminal(text: str) -> None:
    screen = Screen()
    ReplyView(screen, spelled(text)).show(chunk(text, [0], 0))
    shown = screen.getvalue()
    assert len(shown) == len(text)
    assert shown.isprintable()


@given(st.text())
def test_harmless_text_keeps_its_length_and_all_that_prints(text: str) -> None:
    shown = harmless(text)
    assert len(shown) == len(text)
    for before, after in zip(text, shown, strict=True):
        if before in "\n\t" or before.isprintable():
            assert after == before
        assert after in "\n\t" or ord(after) >= 0x20
        assert not 0x7F <= ord(after) < 0xA0


@pytest.mark.usefixtures("colours")
def test_markup_in_a_reply_is_text() -> None:
    screen = Screen()
    text = "[bold red]x[/] :smile: [link=file:///]y[/link]"
    ReplyView(screen, spelled(text)).show(chunk(text, [0], 0))
    assert screen.getvalue() == text


@pytest.mark.parametrize(
    ("texts", "ended"), [(["a"], "a\n"), (["a\n"], "a\n"), ([], ""), (["a", ""], "a\n")]
)
def test_the_line_is_ended_once(texts: list[str], ended: str) -> None:
    out = io.StringIO()
    view = ReplyView(out, spelled())
    for text in texts:
        view.show(chunk(text, [], 0))
    view.end_line()
    view.end_line()
    assert out.getvalue() == ended


def test_the_legend_wears_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "NO_COLOR" not in os.environ
    assert Ink.of(Screen()).legend().startswith("\x1b[32m")
    assert "\x1b" not in Ink.of(io.StringIO()).legend()


GENERATE = (
    "import sys; from tests.fake_talker import run; "
    "sys.exit(run(['generate', 'tiny', '-p', 'hello', '--max-tokens', '60']))"
)


def test_generate_marks_accepted_drafts_on_a_terminal_and_explains_the_mark() -> None:
    screen, code = converse(GENERATE, [])
    assert code == 0
    assert "\x1b[32m<" in screen
    assert "\x1b[32mlike this\x1b[0m" in screen
    assert "tok/s" in screen


def test_generate_writes_the_same_text_without_marks_to_a_pipe() -> None:
    run = subprocess.run(
        [sys.executable, "-c", GENERATE], capture_output=True, text=True, check=True, cwd=ROOT
    )
    screen, _ = converse(GENERATE, [])
    assert "\x1b" not in run.stdout + run.stderr
    assert "like this" not in run.stderr
    assert re.fullmatch(r"(<\d+>){60}", run.stdout)
    assert "".join(re.findall(r"<\d+>", screen)) == run.stdout
