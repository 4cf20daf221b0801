"""How tokens are spelled in log-probabilities.

A token is shown as the text that it adds, or by its own name if it adds none ("<|im_end|>"). Its
bytes go along, since a token need not be whole characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from slipstream.types import TokenLogprobs

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot write


class Tokenizer(Protocol):
    """What is asked of a model's tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it."""


class Speller:
    """Spells the tokens of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def spell(self, token_id: int) -> tuple[str, bytes]:
        """Return a token's text and its bytes."""
        raw = self._tokenizer.token_bytes(token_id)
        if not raw:
            raw = self._tokenizer.token_text(token_id).encode()
        return raw.decode("utf-8", errors="replace"), raw

    def chat(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[dict[str, Any]]:
        """Return the entries of a chat reply's `logprobs.content`."""
        return [
            self._entry(token_id, entry.logprob)
            | {"top_logprobs": [self._entry(*top) for top in entry.top]}
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
    ) -> tuple[dict[str, list[Any]], int]:
        """Return a text completion's `logprobs`, and where the next token begins.

        Args:
            offset: characters that the tokens before have spelled.
        """
        out: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            text, _ = self.spell(token_id)
            out["tokens"].append(text)
            out["token_logprobs"].append(max(entry.logprob, LOWEST))
            out["top_logprobs"].append({self.spell(i)[0]: max(lp, LOWEST) for i, lp in entry.top})
            out["text_offset"].append(offset)
            offset += len(text)
        return out, offset

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self.spell(token_id)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(raw)}
