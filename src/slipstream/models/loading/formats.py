"""The tensor encodings of a GGUF file, mapped bit for bit onto the canonical tensors.

A GGUF row is a run of blocks of one size. Decoding only moves bits: codes are unpacked to a byte
each, scales are copied, nothing is multiplied, so `Tensor.dequantize` gives the very values that
the format defines. Layouts are in `blocks.py` and `k_quants.py`; the formats of 2 and 3 bits and
those with tables (IQ, TQ, MXFP4) are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import LoadError
from slipstream.models.loading.blocks import (
    BLOCK,
    Decode,
    decode_dense,
    decode_q4_0,
    decode_q4_1,
    decode_q5_0,
    decode_q5_1,
    decode_q8_0,
)
from slipstream.models.loading.k_quants import (
    SUPER_BLOCK,
    decode_q4_k,
    decode_q5_k,
    decode_q6_k,
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """One tensor encoding.

    Attributes:
        name: GGML's name, e.g. "Q4_1".
        block: elements of one block; a row holds whole blocks.
        block_bytes: bytes of one block.
        decode: maps uint8 of shape (bytes,) and the tensor's shape to the canonical tensor.
    """

    name: str
    block: int
    block_bytes: int
    decode: Decode

    @property
    def is_quantized(self) -> bool:
        """True where elements share a scale."""
        return self.block > 1

    def num_bytes(self, num_elements: int) -> int:
        """Return the stored size of `num_elements`, a multiple of `block`."""
        return num_elements // self.block * self.block_bytes


def supported_names() -> str:
    """Return the readable encodings as one comma-separated text, for messages."""
    return ", ".join(item.name for item in FORMATS.values())


def find_format(type_id: int) -> Format:
    """Return the encoding of a GGML type number.

    Raises:
        LoadError: an encoding that is not read here; the supported ones are listed.
    """
    if type_id in FORMATS:
        return FORMATS[type_id]
    name = _OTHER_TYPES.get(type_id, "unknown")
    raise LoadError(
        f"tensor type must be one of {supported_names()}, got {name} (type {type_id})",
        hint="requantise the model to Q4_K, Q6_K or Q8_0",
    )


# Keys are GGML's type numbers (enum ggml_type).
FORMATS = {
    0: Format(name="F32", block=1, block_bytes=4, decode=decode_dense("f32", "<f4")),
    1: Format(name="F16", block=1, block_bytes=2, decode=decode_dense("f16", "<f2")),
    30: Format(name="BF16", block=1, block_bytes=2, decode=decode_dense("bf16", "<u2")),
    2: Format(name="Q4_0", block=BLOCK, block_bytes=18, decode=decode_q4_0),
    3: Format(name="Q4_1", block=BLOCK, block_bytes=20, decode=decode_q4_1),
    6: Format(name="Q5_0", block=BLOCK, block_bytes=22, decode=decode_q5_0),
    7: Format(name="Q5_1", block=BLOCK, block_bytes=24, decode=decode_q5_1),
    8: Format(name="Q8_0", block=BLOCK, block_bytes=34, decode=decode_q8_0),
    12: Format(name="Q4_K", block=SUPER_BLOCK, block_bytes=144, decode=decode_q4_k),
    13: Format(name="Q5_K", block=SUPER_BLOCK, block_bytes=176, decode=decode_q5_k),
    14: Format(name="Q6_K", block=SUPER_BLOCK, block_bytes=210, decode=decode_q6_k),
}

# Names of encodings that files in the wild carry, so that a refusal can say which it met.
_OTHER_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
