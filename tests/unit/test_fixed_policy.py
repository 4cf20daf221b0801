"""Off and FixedK, and the policy that a request's k setting resolves to."""

from __future__ import annotations

import pytest

from slipstream.config import EngineConfig
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.pairing import Pairing
from slipstream.policy.base import Decision, RoundOutcome, RoundView
from slipstream.policy.fixed import FixedK, Off
from slipstream.types import KSetting

OUTCOME = RoundOutcome(k=4, accepted=0, emitted=1, draft_s=9.0, verify_s=9.0, round_s=99.0)


def view(ceiling: int, proposed: int = 0) -> RoundView:
    return RoundView(remaining=ceiling + 1, context_len=10, proposed=proposed, ceiling=ceiling)


@pytest.mark.parametrize("k", range(16))
def test_fixed_k_drafts_k_or_what_fits(k: int) -> None:
    policy = FixedK(k=k)
    for ceiling in range(16):
        decision = policy.choose(view(ceiling))
        assert decision.k == min(k, ceiling)
        assert decision.reason
    assert (policy.mode, policy.verdict) == (f"fixed:{k}", "fixed")


def test_off_never_drafts() -> None:
    assert Off(reason="off").choose(view(15, proposed=15)) == Decision(k=0, reason="off")


def test_fixed_policies_learn_nothing() -> None:
    for policy in (Off(reason="off"), FixedK(k=4)):
        before = policy.choose(view(15))
        for _ in range(100):
            policy.observe(OUTCOME)
        assert policy.choose(view(15)) == before


@pytest.mark.parametrize(
    ("k", "drafter", "ceiling", "mode", "verdict", "width"),
    [
        ("auto", "ngram", 15, "auto", "unmeasured", 0),
        ("auto", "ngram", 0, "auto", "off", 0),
        ("auto", "none", 15, "auto", "off", 0),
        ("off", "ngram", 15, "off", "off", 0),
        (0, "ngram", 15, "off", "off", 0),
        (7, "ngram", 15, "fixed:7", "fixed", 7),
        (7, "none", 15, "fixed:7", "off", 0),
    ],
)
def test_k_setting_resolves_to_a_policy_with_a_reason(
    k: KSetting, drafter: str, ceiling: int, mode: str, verdict: str, width: int
) -> None:
    pairing = Pairing.fresh(EngineConfig(profile="off"), [NGramDrafter])
    policy = pairing.policy_of(1, k, drafter=drafter, ceiling=ceiling)
    assert (policy.mode, policy.verdict) == (mode, verdict)
    assert policy.choose(view(15, proposed=15)).k == width
    assert policy.reason
    assert policy.choose(view(15, proposed=15)).reason
    assert policy.predicted_speedup is None


@pytest.mark.parametrize("k", ["off", 0])
def test_an_engine_that_never_drafts_has_no_policy(k: KSetting) -> None:
    assert Pairing.fresh(EngineConfig(k=k), [NGramDrafter]).policy is None
    assert Pairing.fresh(EngineConfig()).policy is None
