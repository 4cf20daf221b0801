"""Exact acceptance: a draft token counts iff the target picks it itself.

Row i of a verify holds the anchor and the first i drafts, so what the sampler picks from its logits
(their argmax, for a greedy request without penalties) is the target's own choice after them. Drafts
are accepted as long as they equal those choices; the choice after the last accepted one is the
bonus token. Every emitted token is thus the target's, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slipstream.types import FinishReason


def accept_drafts(drafts: Sequence[int], target_ids: Sequence[int]) -> tuple[int, list[int]]:
    """Compare drafts with the target's choices.

    Args:
        drafts: k drafted ids.
        target_ids: the target's choices of the k + 1 rows.

    Returns:
        The accepted count and the accepted + 1 emitted ids. Drafts [5, 6, 7] against choices
        [5, 6, 9, 2] accept 2 and emit [5, 6, 9].
    """
    accepted = 0
    for draft, target_id in zip(drafts, target_ids, strict=False):
        if draft != target_id:
            break
        accepted += 1
    return accepted, list(target_ids[: accepted + 1])


def cut(
    emitted: Sequence[int], stop_ids: Collection[int], remaining: int
) -> tuple[list[int], FinishReason | None]:
    """End a round's tokens at the first stop id, kept, or at the request's last token.

    Args:
        emitted: the ids of one round, in order.
        stop_ids: ids that end the reply.
        remaining: tokens that the request may still emit, >= 1.

    Returns:
        The ids that stay and why the reply ends, None if it goes on. A stop id that is also the
        last token allowed is a stop.
    """
    for i, token_id in enumerate(emitted[:remaining]):
        if token_id in stop_ids:
            return list(emitted[: i + 1]), "stop"
    if len(emitted) >= remaining:
        return list(emitted[:remaining]), "length"
    return list(emitted), None
