"""Where a request's drafts come from for free: what it brings along itself, then its pairing."""

from __future__ import annotations

from slipstream.drafters.base import Drafter
from slipstream.drafters.combined import CombinedDrafter
from slipstream.drafters.forced import ForcedDrafter
from slipstream.drafters.prediction import PredictedText, PredictionDrafter
from slipstream.engine.matcher import Matcher


def free_sources(
    drafter: Drafter | None,
    matcher: Matcher | None,
    predicted: PredictedText | None,
    prompt_len: int,
) -> Drafter | None:
    """Return what offers a request drafts before the policy decides, None where nothing does.

    What the grammar forces is certain, so it goes first; then the prediction.

    Args:
        drafter: the pairing's free drafter, made for this request; None without one.
        matcher: where the reply stands in its grammar, None without one.
        predicted: the request's predicted output, None without one.
    """
    sources: list[Drafter] = []
    if matcher is not None:
        sources.append(ForcedDrafter(matcher.forced))
    if predicted is not None:
        sources.append(PredictionDrafter(predicted, prompt_len))
    if not sources:
        return drafter
    return CombinedDrafter(sources if drafter is None else [*sources, drafter])
