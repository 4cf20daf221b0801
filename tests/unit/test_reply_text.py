"""Stop strings: found wherever they straddle tokens and rounds, never shown, not even begun."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.text import ReplyText
from slipstream.models.loading.detokenizer import Detokenizer


def reply_text(*stops: str, words: list[bytes] | None = None) -> ReplyText:
    """Return a text whose ids are bytes, or indexes into `words`."""
    spell = (lambda i: words[i]) if words is not None else (lambda i: bytes([i]))
    return ReplyText(Detokenizer(spell), stops)


def serial(text: str, *stops: str) -> tuple[str, int | None]:
    """Return what is shown of a text, and the bytes up to the end of the stop string."""
    reply = reply_text(*stops)
    for i, byte in enumerate(text.encode()):
        _, num_used = reply.push([byte])
        if num_used is not None:
            return str(reply), i + 1
    reply.finish()
    return str(reply), None


def test_a_text_without_stops_passes_at_once() -> None:
    reply = reply_text()
    assert reply.push(b"ab") == ("ab", None)
    assert reply.push("é".encode()[:1]) == ("", None)
    assert reply.finish() == "\ufffd"
    assert str(reply) == "ab\ufffd"


def test_text_that_may_begin_a_stop_is_held_back_and_let_go() -> None:
    reply = reply_text("STOP")
    assert reply.push(b"a ST") == ("a ", None)
    assert reply.push(b"ST") == ("ST", None)
    assert reply.push(b"A") == ("STA", None)
    assert reply.push(b"ST") == ("", None)
    assert reply.finish() == "ST"
    assert str(reply) == "a STSTAST"


def test_text_ends_before_the_stop_and_ids_with_the_token_that_completed_it() -> None:
    words = [b"one ", b"two S", b"TO", b"P three", b"four"]
    reply = reply_text("STOP", words=words)
    assert reply.push([0, 1]) == ("one two ", None)
    assert reply.push([2, 3, 4]) == ("", 2)
    assert reply.finish() == ""
    assert str(reply) == "one two "


def test_the_first_of_several_stops_counts() -> None:
    assert reply_text("d", "bc", words=[b"abcd"]).push([0]) == ("a", 1)
    assert reply_text("abcd", "bc").push(b"xabcd") == ("xa", 4)


def test_a_stop_inside_a_character_of_several_bytes_waits_for_it() -> None:
    reply = reply_text("é!")
    assert reply.push("xé".encode()[:-1]) == ("x", None)
    assert reply.push("é".encode()[1:]) == ("", None)
    assert reply.push(b"!") == ("", 1)


def test_a_stop_that_comes_too_early_is_text() -> None:
    reply = reply_text("ab")
    assert reply.push(b"abab", may_stop_after=2) == ("ab", 4)
    assert str(reply) == "ab"


STOPS = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text("abé", max_size=30), STOPS, st.data())
def test_how_ids_are_cut_into_rounds_changes_nothing(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    reply, ids = reply_text(*stops), list(text.encode())
    pieces, used, done = "", 0, False
    while used < len(ids) and not done:
        size = data.draw(st.integers(1, 6))
        piece, num_used = reply.push(ids[used : used + size])
        done = num_used is not None
        used += num_used if num_used is not None else len(ids[used : used + size])
        pieces += piece
    pieces += "" if done else reply.finish()
    assert pieces == str(reply)
    assert (pieces, used if done else None) == serial(text, *stops)


@given(st.text("abé", max_size=30), STOPS)
def test_no_stop_is_ever_shown_and_nothing_is_lost(text: str, stops: list[str]) -> None:
    shown, _ = serial(text, *stops)
    at = [text.find(stop) for stop in stops if stop in text]
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    assert (shown == text) == (not at)


@pytest.mark.parametrize("stop", ["aab", "aaab"])
def test_a_stop_that_begins_inside_a_failed_beginning_is_found(stop: str) -> None:
    assert serial("xaaaab!", stop)[0] == "x" + "a" * (4 - stop.count("a"))
