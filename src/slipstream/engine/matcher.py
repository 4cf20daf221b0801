"""Where one reply stands in its grammar: which tokens may come next.

A matcher is a part of a row's history (engine/sampling/history.py): a token is pushed once it is
chosen, so each row of a verify is masked by what its own row's past allows, accepted drafts
included, and rows behind a rejected draft are never masked. Nothing of a rejected draft is ever
pushed, so nothing has to be rolled back behind it; `pop` is there for whoever pushes on trial.

Ids that end a reply are kept apart from the grammar: they are allowed where the grammar is
complete, and where it can only be complete nothing else is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import SlipstreamError
from slipstream.kernels.ops import Int32

Bool = npt.NDArray[np.bool_]


class Matcher:
    """The grammar's state after the tokens of one reply.

    Args:
        state: llguidance's matcher, this one's own.
        end_id: the id by which `state` says that the grammar may end here.
        stop_ids: ids that end the reply; `end_id` is one of them.
    """

    def __init__(self, state: Any, *, end_id: int, stop_ids: Collection[int]) -> None:
        self._state = state
        self._end_id = end_id
        self._stop_ids = frozenset(stop_ids)
        self._stops: Int32 = np.array(sorted(stop_ids), np.int32)
        self._has_ended = False
        self._allowed: Bool | None = None

    def allowed(self) -> Bool | None:
        """Return which ids may come next, bool of shape (V,); None behind the reply's end.

        Raises:
            SlipstreamError: the grammar takes more work than its limits allow.
        """
        if self._has_ended:
            return None
        if self._allowed is None:
            allowed = np.frombuffer(self._state.compute_logit_bias(), np.uint8) != 0
            self._check()
            allowed[self._stops] = allowed[self._end_id]
            self._allowed = allowed
        return self._allowed

    def surely_allows(self, token_id: int) -> bool:
        """Return whether a token is known to be allowed, for far less than a mask costs.

        False says nothing: a stop id, for one, is left to the mask.
        """
        if self._has_ended or token_id in self._stop_ids:
            return False
        forced = self._state.compute_ff_tokens()
        if forced:
            return bool(forced[0] == token_id)
        return bool(self._state.validate_tokens([token_id]) == 1)

    @property
    def must_stop(self) -> bool:
        """Whether the grammar is complete and nothing may follow but the reply's end."""
        allowed = self.allowed()
        if allowed is None or not allowed[self._end_id]:
            return False
        return int(np.count_nonzero(allowed)) == len(self._stops)

    def push(self, token_id: int) -> None:
        """Take the next token, one that `allowed` allows."""
        self._allowed = None
        if self._has_ended:
            return
        if token_id in self._stop_ids:
            self._has_ended = True
        elif not self._state.consume_token(token_id):
            self._check()

    def pop(self) -> None:
        """Take back the last token; a stop id is the last one that can be pushed."""
        self._allowed = None
        if self._has_ended:
            self._has_ended = False
        else:
            self._state.rollback(1)

    def allowed_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """Return as many of some tokens as may come next in this order, a stop id at most last."""
        if self._has_ended:
            return []
        mapped: list[int] = []
        for token_id in token_ids:
            if token_id in self._stop_ids:
                mapped.append(self._end_id)
                break
            mapped.append(token_id)
        if mapped == [self._end_id]:  # a state that can only end validates nothing, not even this
            allowed = self.allowed()
            return [token_ids[0]] if allowed is not None and allowed[self._end_id] else []
        return list(token_ids[: self._state.validate_tokens(mapped)])

    def forced(self) -> list[int]:
        """Return tokens that come next because the grammar leaves no choice; often none."""
        return [] if self._has_ended else list(self._state.compute_ff_tokens())

    def _check(self) -> None:
        if self._state.is_error():
            message = error_line(self._state.get_error())
            raise SlipstreamError(f"the reply's grammar cannot be followed further: {message}")


def error_line(message: str) -> str:
    """Return what llguidance says, on one line, without its internals and its own places."""
    for rest in ("<state>", "<non-verbose/>", "while processing json-schema:"):
        message = message.split(rest)[0]
    lines = message.split("\n")
    return " ".join(line.strip() for line in lines if line.strip())[:300]
