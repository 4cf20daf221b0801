"""Whether two models speak of the same tokens: a draft's ids are the target's ids.

Vocabularies are compared by how tokens are spelled, not by what files call themselves. Models of
one family often differ in padding: rows of the embedding that no text uses, spelled in whatever way
the converter had. Those may differ, and so may their number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from slipstream.errors import MismatchError

# How converters and vocabularies spell what no text uses; an empty text is one too.
_PADDING = re.compile(
    r"|(?:\[|<|<\|)_?(?:pad|padding|unused|reserved|dummy|reserved_special_token|special)"
    r"[-_]?(?:token)?[-_]?\d+(?:\]|>|\|>)",
    re.IGNORECASE,
)


class Spelled(Protocol):
    """What is compared of a tokenizer."""

    @property
    def vocabulary(self) -> Sequence[str]:
        """Tokens as the vocabulary spells them, in order of their ids."""

    @property
    def unused_ids(self) -> frozenset[int]:
        """Ids that the file itself says no text uses."""


def check_same_vocabulary(target: Spelled, draft: Spelled) -> None:
    """Refuse a draft model whose tokens are not the target's.

    Raises:
        MismatchError: a token differs, or one vocabulary goes on with real tokens; both sizes and
            the first id that differs are named.
    """
    ours, theirs = target.vocabulary, draft.vocabulary
    for token_id in range(max(len(ours), len(theirs))):
        ours_text = ours[token_id] if token_id < len(ours) else ""
        theirs_text = theirs[token_id] if token_id < len(theirs) else ""
        if ours_text == theirs_text:
            continue
        if _is_padding(target, token_id, ours_text) and _is_padding(draft, token_id, theirs_text):
            continue
        raise MismatchError(
            "the draft model must have the target's vocabulary: the target has "
            f"{len(ours)} tokens, the draft model {len(theirs)}, and token {token_id} is "
            f"{_described(ours, token_id)} in the target, {_described(theirs, token_id)} in the "
            "draft model",
            hint="take a draft model of the target's own family, or drafter ngram",
        )


def _is_padding(tokenizer: Spelled, token_id: int, text: str) -> bool:
    return token_id in tokenizer.unused_ids or _PADDING.fullmatch(text) is not None


def _described(vocabulary: Sequence[str], token_id: int) -> str:
    return repr(vocabulary[token_id][:80]) if token_id < len(vocabulary) else "missing"
