"""Where one request's drafts come from: what it brings along itself, then its pairing's drafter."""

from __future__ import annotations

from slipstream.drafters.base import Drafter
from slipstream.drafters.combined import CombinedDrafter
from slipstream.drafters.forced import ForcedDrafter
from slipstream.drafters.prediction import PredictedText, PredictionDrafter
from slipstream.engine.matcher import Matcher


def with_own_sources(
    drafter: Drafter, matcher: Matcher | None, predicted: PredictedText | None, prompt_len: int
) -> Drafter:
    """Return a drafter that first asks the request's own sources.

    What the grammar forces is certain, so it goes first; then the prediction. A drafter that costs
    time is left as it is: whoever is asked before the policy decides must be free.

    Args:
        drafter: the pairing's, made for this request.
        matcher: where the reply stands in its grammar, None without one.
        predicted: the request's predicted output, None without one.
    """
    own: list[Drafter] = []
    if matcher is not None:
        own.append(ForcedDrafter(matcher.forced))
    if predicted is not None:
        own.append(PredictionDrafter(predicted, prompt_len))
    return CombinedDrafter([*own, drafter]) if own and drafter.free else drafter
