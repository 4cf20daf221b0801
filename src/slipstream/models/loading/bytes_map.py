"""GPT-2's printable spelling of bytes, in which byte-level vocabularies are written.

Printable Latin-1 characters stand for themselves; the other 68 bytes take the code points from 256
on, in order, so a space is "Ġ" and a newline "Ċ". Source: `bytes_to_unicode` of OpenAI's GPT-2.
"""

from __future__ import annotations


def _spellings() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _spellings()


def spelled_bytes(text: str) -> bytes:
    """Return the bytes that a vocabulary entry spells; e.g. "Ġhi" gives b" hi".

    A character outside the spelling, which no byte-level trainer writes, stands for its own UTF-8.
    """
    try:
        return bytes([BYTE_OF[char] for char in text])
    except KeyError:
        return b"".join(
            bytes([BYTE_OF[char]]) if char in BYTE_OF else char.encode() for char in text
        )
