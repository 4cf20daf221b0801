"""Of several free drafters the first that offers something is heard, and the report says which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from slipstream.drafters.combined import CombinedDrafter, source_of
from slipstream.drafters.forced import ForcedDrafter
from slipstream.drafters.ngram import NGramDrafter
from slipstream.errors import RequestError
from slipstream.types import KSetting, Reply, SamplingParams
from tests.fake_model import Scripted, continuation, fake_engine

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
COUNT = 40
TEXT = "predicted"


class Fixed:
    """Offers the same tokens every time."""

    max_k = 15
    free = True

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self.name, self.tokens = name, list(tokens)
        self.calls: list[Any] = []

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        self.calls.append(("propose", k))
        return self.tokens[:k]

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        self.calls.append(("observe", list(proposed), accepted))

    def release(self) -> None:
        self.calls.append("release")


@pytest.mark.parametrize(
    ("offers", "k", "expected", "source"),
    [
        (([], [], []), 4, [], "a"),
        (([1, 2], [3, 4, 5], []), 4, [1, 2], "a"),
        (([], [3, 4, 5], [6]), 2, [3, 4], "b"),
        (([1], [1, 2, 3], [1, 2, 3, 4]), 9, [1, 2, 3, 4], "c"),
        (([1], [1, 2, 3], [9, 9, 9, 9]), 9, [1, 2, 3], "b"),
        (([1], [1, 2, 3], []), 1, [1], "a"),
    ],
)
def test_the_first_offer_counts_unless_another_goes_on_from_it(
    offers: Sequence[Sequence[int]], k: int, expected: list[int], source: str
) -> None:
    drafters = [Fixed(name, tokens) for name, tokens in zip("abc", offers, strict=True)]
    combined = CombinedDrafter(drafters)
    assert combined.propose([0], k) == expected
    assert combined.propose([0], 15)[:k] == expected
    combined.propose([0], k)
    assert source_of(combined) == source
    combined.observe([8], 1)
    told = [d.name for d in drafters if ("observe", [8], 1) in d.calls]
    assert told == [source]
    combined.release()
    assert all(drafter.calls[-1] == "release" for drafter in drafters)


def test_names_are_those_of_its_parts() -> None:
    combined = CombinedDrafter([Fixed("x", []), NGramDrafter()])
    assert (combined.name, combined.sources) == ("x+ngram", ("x", "ngram"))
    assert source_of(NGramDrafter()) == "ngram"


def test_a_paid_drafter_is_not_asked_before_the_policy() -> None:
    with pytest.raises(AssertionError, match="must cost nothing"):
        CombinedDrafter([Scripted([1])])


def test_what_is_forced_is_cut_to_k_and_forgotten() -> None:
    drafter = ForcedDrafter(lambda: [4, 5, 6])
    assert [drafter.propose([1], k) for k in (0, 2, 9)] == [[], [4, 5], [4, 5, 6]]
    drafter.observe([4], 1)
    drafter.release()
    assert drafter.propose([1], 3) == []


def predicted_reply(
    monkeypatch: pytest.MonkeyPatch, prediction: Sequence[int], **settings: Any
) -> Reply:
    """Return a reply with a prediction of these tokens, from an engine with n-gram drafts."""
    request_k, count = settings.pop("request_k", None), settings.pop("count", COUNT)
    engine = fake_engine(**{"drafter": NGramDrafter, "k": 6, **settings})
    params = SamplingParams(max_tokens=count, prediction=TEXT, k=request_k)
    # The first call asks what is put before any text.
    calls = iter([[], list(prediction)])
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: next(calls, []))
    (reply,) = engine.generate([PROMPT], params)
    assert reply.token_ids == continuation(PROMPT, count)
    return reply


def test_a_right_prediction_is_accepted_and_counted_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = predicted_reply(monkeypatch, continuation(PROMPT, COUNT)).speculation
    counts = report.sources["prediction"]
    assert counts["accepted"] == counts["drafted"] > 0.8 * COUNT
    assert report.sources["ngram"]["drafted"] == 0
    assert report.drafter == "prediction+ngram"


def test_a_wrong_prediction_is_rejected_and_the_pairing_s_drafter_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = predicted_reply(monkeypatch, [96, 95, 94, 93] * 3, count=200).speculation
    counts = report.sources["prediction"]
    assert counts["drafted"] > counts["accepted"]
    assert report.sources["ngram"]["accepted"] > 0
    assert report.drafted == sum(source["drafted"] for source in report.sources.values())
    assert report.accepted == sum(source["accepted"] for source in report.sources.values())


def test_a_prediction_goes_before_a_paid_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    text = continuation(PROMPT, COUNT)
    paid = Scripted(PROMPT + text)
    right = predicted_reply(monkeypatch, text, drafter=lambda: paid).speculation
    assert right.drafter == "prediction+scripted"
    assert right.sources["prediction"]["accepted"] > 0.8 * COUNT
    half = predicted_reply(monkeypatch, text[: COUNT // 2], drafter=lambda: paid).speculation
    assert half.sources["prediction"]["accepted"] > 0.3 * COUNT
    assert half.sources["scripted"]["accepted"] > 0.3 * COUNT
    assert half.drafted == sum(source["drafted"] for source in half.sources.values())


@pytest.mark.parametrize("request_k", ["off", 0])
def test_off_stops_all_drafters(monkeypatch: pytest.MonkeyPatch, request_k: KSetting) -> None:
    asked: list[object] = []
    for name in ("propose", "observe"):
        monkeypatch.setattr(NGramDrafter, name, lambda *_: asked.append(_) or [])

    def no_prediction(*_: object) -> None:
        raise AssertionError("a prediction was looked at")

    monkeypatch.setattr("slipstream.engine.check.PredictedText", no_prediction)
    reply = predicted_reply(monkeypatch, continuation(PROMPT, COUNT), request_k=request_k)
    assert not asked
    assert (reply.speculation.verdict, reply.speculation.rounds) == ("off", 0)
    assert reply.speculation.classic_rounds == COUNT - 1


@pytest.mark.parametrize("settings", [{"k": "off"}, {"drafter": None}])
def test_an_engine_that_never_drafts_ignores_predictions(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    reply = predicted_reply(monkeypatch, continuation(PROMPT, COUNT), **settings)
    assert reply.speculation.rounds == 0
    assert "prediction" not in reply.speculation.sources


@pytest.mark.parametrize("own", [3, "auto", "off"])
@pytest.mark.parametrize("asked", ["auto", "off", 0, 1, 3, 4, 15])
def test_a_request_can_only_lower_the_engine_s_ceiling(own: KSetting, asked: KSetting) -> None:
    ceiling = {"auto": 15, "off": 0}.get(own, own) if isinstance(own, str) else own
    script = PROMPT + continuation(PROMPT, COUNT)
    engine = fake_engine(drafter=lambda: Scripted(script, free=True), k=own)
    params = SamplingParams(max_tokens=COUNT, k=asked)
    if isinstance(asked, int) and asked > ceiling:
        with pytest.raises(RequestError) as caught:
            engine.generate([PROMPT], params)
        assert f"in [0, {ceiling}] here, got {asked}" in caught.value.message
        assert caught.value.param == "k"
        return
    (reply,) = engine.generate([PROMPT], params)
    widths = [int(k) for k in reply.speculation.k_histogram]
    if isinstance(asked, int) and asked:
        assert max(widths) == asked
    assert all(k <= ceiling for k in widths)
    if asked in ("off", 0):
        assert not widths


def test_a_prediction_that_is_no_text_of_unicode_is_refused() -> None:
    engine = fake_engine(drafter=NGramDrafter)

    def refuse(text: str, *, parse_special: bool) -> list[int]:
        if text:
            raise RequestError("text must be valid Unicode, got a lone surrogate at 0")
        return []

    engine.tokenizer.encode = refuse  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="lone surrogate") as caught:
        engine.check(PROMPT, SamplingParams(prediction="\ud800"))
    assert caught.value.param == "prediction"
