"""What a grammar leaves no choice about: the rest of a key, the only value, the closing brackets.

Where the vocabulary's own spelling of the forced text is forced too, such drafts are always
accepted. Known as jump-forward decoding (SGLang, Zheng et al. 2024, arXiv 2312.07104); here the
target still reads the tokens as rows of a verify, so the reply is what it would be without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.types import MAX_K


class ForcedDrafter:
    """Proposes what must come next.

    Args:
        forced: returns the tokens that must follow the committed ones, as far as they are known.
    """

    name = "grammar"
    max_k = MAX_K
    free = True

    def __init__(self, forced: Callable[[], list[int]]) -> None:
        self._forced = forced

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Return at most k tokens that must follow, often none."""
        return self._forced()[:k] if k > 0 else []

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        """Learn nothing."""

    def release(self) -> None:
        """Keep nothing."""
        self._forced = list
