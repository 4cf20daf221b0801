"""The scripted drafter: exact rates, whatever k, the order of calls and the shape of the script."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.drafters.scripted import ScriptedDrafter, ScriptedSpec
from slipstream.errors import ConfigError
from slipstream.types import SamplingParams
from tests.fake_model import VOCAB, continuation, fake_engine

PROMPT = [3, 1, 4, 1, 5]
SCRIPT = [*PROMPT, *random.Random(1).choices(range(VOCAB), k=20_000)]
SEEDS = st.integers(0, 2**64 - 1)
RATES = st.lists(st.floats(0, 1), min_size=1, max_size=5).map(tuple)


def drafter(*rates: float, seed: int = 0, script: Sequence[int] = SCRIPT) -> ScriptedDrafter:
    return ScriptedDrafter([script], ScriptedSpec(rates=rates, seed=seed), vocab_size=VOCAB)


def replay(drafting: ScriptedDrafter, k: int) -> tuple[Counter[int], Counter[int], int]:
    """Run rounds through the whole script; return offers and acceptances by place, and rounds.

    A place is offered when all before it were accepted.
    """
    offered: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    text, rounds = list(PROMPT), 0
    while len(text) + k < len(SCRIPT):
        rounds += 1
        for place, token_id in enumerate(drafting.propose(text, k)):
            offered[place] += 1
            if token_id != SCRIPT[len(text) + place]:
                break
            accepted[place] += 1
        else:
            place = k
        text += SCRIPT[len(text) : len(text) + place + 1]
    return offered, accepted, rounds


@pytest.mark.parametrize("k", [1, 4, 15])
@pytest.mark.parametrize("rates", [(0.56,), (0.9, 0.6, 0.3), (0.2, 0.95), (1.0, 0.5, 0.0)])
def test_measured_acceptance_of_every_place_is_its_rate(rates: tuple[float, ...], k: int) -> None:
    spec = ScriptedSpec(rates=rates)
    offered, accepted, rounds = replay(drafter(*rates), k)
    for place in range(k):
        rate, count = spec.rate(place), offered[place]
        slack = 4 * (rate * (1 - rate) * count) ** 0.5  # four standard deviations
        assert abs(accepted[place] - rate * count) <= slack
    assert 1 + accepted.total() / rounds == pytest.approx(spec.acceptance_length(k), rel=0.03)


def test_rates_of_0_and_1_are_never_and_always() -> None:
    assert drafter(1.0).propose(PROMPT, 15) == SCRIPT[5:20]
    wrong = drafter(0.0).propose(PROMPT, 15)
    assert all(got != right for got, right in zip(wrong, SCRIPT[5:20], strict=True))


@given(RATES, SEEDS, st.integers(5, 200))
def test_narrower_proposal_is_a_prefix_of_a_wider_one(
    rates: tuple[float, ...], seed: int, length: int
) -> None:
    widest = drafter(*rates, seed=seed).propose(SCRIPT[:length], 15)
    for k in range(16):
        assert drafter(*rates, seed=seed).propose(SCRIPT[:length], k) == widest[:k]


@given(RATES, SEEDS, st.lists(st.tuples(st.integers(5, 80), st.integers(0, 15)), max_size=8))
def test_proposal_does_not_depend_on_the_calls_before(
    rates: tuple[float, ...], seed: int, calls: list[tuple[int, int]]
) -> None:
    one = drafter(*rates, seed=seed)
    for length, k in calls:  # lengths fall as well as grow
        fresh = drafter(*rates, seed=seed).propose(SCRIPT[:length], k)
        assert one.propose(SCRIPT[:length], k) == fresh


@given(RATES, SEEDS)
def test_every_proposed_token_is_in_the_vocabulary(rates: tuple[float, ...], seed: int) -> None:
    for token_id in drafter(*rates, seed=seed).propose(PROMPT, 15):
        assert 0 <= token_id < VOCAB


def test_seeds_make_different_mistakes() -> None:
    proposals = {tuple(drafter(0.5, seed=seed).propose(PROMPT, 15)) for seed in range(20)}
    assert len(proposals) > 10


def test_the_end_of_the_script_shortens_the_proposal_to_nothing() -> None:
    script = SCRIPT[:10]
    sizes = [len(drafter(1.0, script=script).propose(SCRIPT[:n], 4)) for n in range(5, 13)]
    assert sizes == [4, 4, 3, 2, 1, 0, 0, 0]


def test_nothing_is_proposed_for_an_unknown_prompt() -> None:
    assert drafter(1.0).propose([9, 9, 9], 4) == []


def test_nothing_is_proposed_any_more_once_the_target_left_the_script() -> None:
    one = drafter(1.0)
    assert one.propose(SCRIPT[:8], 4) == SCRIPT[8:12]
    left = [*SCRIPT[:8], SCRIPT[8] + 1]
    assert one.propose(left, 4) == []
    assert one.propose([*left, *SCRIPT[9:20]], 4) == []


def test_release_lets_the_next_request_follow_another_script() -> None:
    other = [7, 7, *range(30, 60)]
    one = ScriptedDrafter([SCRIPT, other], ScriptedSpec(rates=(1.0,)), vocab_size=VOCAB)
    assert one.propose(SCRIPT[:9], 3) == SCRIPT[9:12]
    one.release()
    assert one.propose(other[:4], 3) == other[4:7]
    one.release()
    assert one.propose(SCRIPT[:6], 3) == SCRIPT[6:9]


@pytest.mark.parametrize("k", [1, 3, 8, 15])
def test_an_engine_accepts_at_the_rates_and_says_what_the_script_says(k: int) -> None:
    # The fake model's choice depends on all that it reads, so a wrong draft that was kept shows.
    script = [*PROMPT, *continuation(PROMPT, 1000)]
    spec = ScriptedSpec(rates=(0.7,), seed=3)
    engine = fake_engine(
        drafter=lambda: ScriptedDrafter([script], spec, vocab_size=VOCAB), max_model_len=1100, k=k
    )
    (reply,) = engine.generate([PROMPT], SamplingParams(max_tokens=1000))
    assert reply.token_ids == script[5:]
    length = reply.speculation.acceptance_length
    assert length == pytest.approx(spec.acceptance_length(k), rel=0.1)


def test_acceptance_length_is_one_plus_the_survival_of_each_place() -> None:
    assert ScriptedSpec(rates=(0.5,)).acceptance_length(2) == 1.75
    assert ScriptedSpec(rates=(0.8, 0.5)).acceptance_length(3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert ScriptedSpec(rates=(0.8,)).acceptance_length(0) == 1


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("scripted:0.56", ScriptedSpec(rates=(0.56,))),
        ("scripted:1", ScriptedSpec(rates=(1.0,))),
        ("scripted:0.8,0.6,0.4", ScriptedSpec(rates=(0.8, 0.6, 0.4))),
        ("scripted:0.8,0.6@7", ScriptedSpec(rates=(0.8, 0.6), seed=7)),
    ],
)
def test_a_spec_reads_as_it_is_written(text: str, spec: ScriptedSpec) -> None:
    assert ScriptedSpec.parse(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        *("", "0.5", "scripted", "scripted:", "scripted:x", "scripted:0.5,", "scripted:1.1"),
        *("scripted:-0.1", "scripted:nan", "scripted:0.5@", "scripted:0.5@x", "scripted:0.5@-1"),
    ],
)
def test_a_spec_that_reads_otherwise_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="scripted"):
        ScriptedSpec.parse(text)


def test_a_vocabulary_without_a_wrong_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2, got 1"):
        ScriptedDrafter([SCRIPT], ScriptedSpec(rates=(0.5,)), vocab_size=1)
