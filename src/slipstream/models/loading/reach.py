"""How much text one id stands for at most: what a text's length says of its ids, unencoded.

Encoding four megabytes takes seconds; that they are more ids than any context holds can be told
from their length. Nothing is guessed: where a tokenizer might leave out or rewrite text so that the
bound fails, there is none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.models.loading.bytes_map import BYTE_OF, spelled_bytes
from slipstream.models.loading.sentence_piece import BYTES, SPACE

# Steps of a tokenizer.json that cut text and leave out nothing; Split is looked at by itself.
_CUTTING = ("ByteLevel", "Digits", "Metaspace")
# Canonical composition makes one byte of four at most: three and a half for Greek letters with two
# marks, three for "K" from the sign of a kelvin.
_COMPOSED = 4


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What encoding does to a text's bytes.

    Attributes:
        longest: bytes that one id stands for at most.
        dropped: bytes that may be left out.
    """

    longest: int
    dropped: bytes = b""

    def fewest_ids(self, text: str) -> int:
        """Return a number of ids that a text has at least."""
        kept = text.encode(errors="surrogatepass").translate(None, self.dropped)
        return -(-len(kept) // self.longest)


def unspelled_bytes(ids: Collection[str]) -> bytes:
    """Return the bytes that a byte-level vocabulary has no token for, and so leaves out."""
    return bytes(byte for char, byte in BYTE_OF.items() if char not in ids)


def piece_bytes(text: str) -> int:
    """Return the bytes of text that a token of SentencePiece's stands for at most.

    It may have come from a space or from the three bytes of "▁" itself.
    """
    return len(text.encode())


def byte_level_bytes(text: str) -> int:
    """Return the bytes of text that a token of a byte-level vocabulary stands for."""
    return len(spelled_bytes(text))


def json_reach(
    block: Mapping[str, Any], texts: Sequence[str], control: Collection[str]
) -> Reach | None:
    """Return the reach of a tokenizer.json, None where it does what is not known to have one.

    Args:
        block: the file.
        texts: all tokens, added ones included.
        control: texts of tokens that text from outside must not spell, and so are left out.
    """
    model, added = block.get("model"), block.get("added_tokens") or []
    if not isinstance(model, Mapping) or model.get("type") != "BPE":
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None  # such a token takes the spaces around it as well
    changes = _steps(block.get("normalizer"), "normalizers")
    if not all(map(_keeps_bytes, changes)):
        return None
    cuts = _steps(block.get("pre_tokenizer"), "pretokenizers")
    if not all(map(_cuts, cuts)) or any(_makes_control(model, control)):
        return None
    composes = any(step.get("type") == "NFC" for step in changes)
    longest = max(map(piece_bytes, texts)) * (_COMPOSED if composes else 1)
    if any(step.get("type") == "ByteLevel" for step in cuts):
        return Reach(longest=longest, dropped=unspelled_bytes(model.get("vocab", {})))
    falls_back = model.get("byte_fallback") and all(text in model["vocab"] for text in BYTES)
    return Reach(longest=longest) if falls_back else None


def _steps(block: Any, name: str) -> list[Mapping[str, Any]]:
    if block is None:
        return []
    steps = block.get(name) if block.get("type") == "Sequence" else [block]
    return list(steps or [])


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Replace":
        return step.get("pattern") == {"String": " "} and step.get("content") == SPACE
    return step.get("type") in ("Prepend", "NFC")


def _cuts(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Split":
        return step.get("behavior") != "Removed"
    return step.get("type") in _CUTTING


def _makes_control(model: Mapping[str, Any], control: Collection[str]) -> Any:
    """Yield whether each merge, or single character, is a control token."""
    yield any(len(text) == 1 for text in control)
    for merge in model.get("merges") or []:
        yield ("".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1)) in control
