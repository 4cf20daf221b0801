"""Why a round drafted nothing, as one of a few words that may be counted under.

A decision's reason is a sentence with numbers in it, for people; a counter wants few names that
stay. Each sentence of the policy begins in a way of its own, and a test holds that none is unknown.
"""

from __future__ import annotations

# What each word means; a counter has no other.
CAUSES = {
    "off": "drafting is off for the request, or there is no drafter",
    "failed": "the request's drafter failed and was dropped",
    "nothing_offered": "the drafter offered nothing, or no draft fits before the limit",
    "resting": "lookups or choices rest until what is owed to the loss budget is paid",
    "unmeasured": "a time that the decision needs is not known yet",
    "remeasured": "a classic step was due, so that its time stays known",
    "does_not_pay": "a round costs more than its tokens are worth",
    "budget": "the loss budget has no room for the round's worst case",
    "neighbour_budget": "a request in the same batch has paid enough for others' drafts",
    "other": "anything else",
}

_BEGINNINGS = (
    ("decline: a round of", "does_not_pay"),
    ("decline: the loss budget", "budget"),
    ("classic:", "remeasured"),
    ("unmeasured:", "unmeasured"),
    ("decline: no draft", "nothing_offered"),
    ("decline: a neighbour's", "neighbour_budget"),
    ("decline: no width", "unmeasured"),
    # The step drafts, but for others of its batch.
    ("enable", "does_not_pay"),
    ("probe", "does_not_pay"),
)


def cause_of(reason: str) -> str:
    """Return the word for the reason of a decision to draft nothing; a key of `CAUSES`."""
    for beginning, cause in _BEGINNINGS:
        if reason.startswith(beginning):
            return cause
    return "other"
