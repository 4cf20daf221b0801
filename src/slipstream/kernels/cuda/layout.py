"""The layout of a packed matrix on the GPU: which kernel reads it, and where each element lies.

The linear kernels multiply with mma.m16n8k16, weights as the A operand. A *tile* is 16 outputs, a
*chunk* 64 columns, four mma steps. K is cut into `splits` spans, a span into `warps` slices, one
for each warp, a slice into `chunks` chunks. The slices' sums are added in order, then the spans':
this cut depends on K alone, so every kernel adds alike, however it shares out the spans.

Within a chunk the order is that of use: for a lane its codes of all four steps lie together (16
bytes at 4 bits), lanes follow each other, and the groups' scales and biases come last. The same
piece of all slices of a span is one contiguous copy. Lane 4 g + t holds outputs g and g + 8. mma
does not care which columns a step multiplies as long as both operands agree, so of each run of 32
columns (16 for groups of 16) lane t takes a contiguous quarter, and inputs load as whole vectors.

Register i of A holds two columns of row g + 8 (i % 2). Its codes are, at 4 bits, nibbles
2 (i % 2) + i / 2 and 4 more of the step's word, at 8 bits bytes i % 2 and 2 more of word i / 2.

At 5 and 6 bits a chunk's nibbles come first, as at 4, then what is above them: a lane's bits of all
steps in one word or two, register i of step s in field 4 s + i of each half.

Scales of two levels are kept as such: the large numbers of 256 columns in each chunk, then the
small ones, those of rows g and g + 8 side by side.

Groups of 128 are kept as two of 64. Columns and outputs are padded with zeros, scales included.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import LoadError
from slipstream.models.weights import (
    BFloat16,
    GroupNumbers,
    QuantizedTensor,
    Tensor,
    TwoLevel,
    float16_numbers,
)

TILE = 16
CHUNK = 64
GROUPS = (16, 32, 64, 128)
DENSE_KINDS = {"bf16": 16, "f16": 17, "f32": 32}
CODE_BITS = (4, 5, 6, 8)
TWO_LEVELS = 2  # kind of scale; others are those of dense numbers
SUPER_COLUMNS = 256  # that share the larger number of two
MAX_WARPS = 16  # slices that a block works on side by side
_MAX_CHUNKS = 8  # of a slice: its inputs for 16 rows take 128 registers
_SPAN_CHUNKS = 32  # of a span: its inputs for 32 rows take half of a multiprocessor's registers
_GOOD_WARPS = 12  # measured: fewer hide less latency, more have more sums to add
_SPLITS = (1, 2, 4, 6, 8, 16)
MAX_CLUSTER = 8  # the largest portable cluster


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one matrix of shape (n, k) is packed.

    Attributes:
        kind: 4, 5, 6 or 8 for codes of that many bits, 16 bfloat16, 17 float16, 32 float32.
        group: columns that share a scale: 16, 32 or 64; 64 where dense.
        zero: the code that stands for 0 before the bias.
        has_bias: True where a scale has a bias beside it.
        scale: kind of scales and biases: 16 bfloat16, 17 float16, or TWO_LEVELS.
        splits, warps, chunks: the cut of K.
    """

    n: int
    k: int
    kind: int
    group: int
    zero: int
    has_bias: bool
    scale: int = DENSE_KINDS["f16"]
    splits: int
    warps: int
    chunks: int

    @property
    def tiles(self) -> int:
        """Tiles of 16 outputs."""
        return -(-self.n // TILE)

    @property
    def quantized(self) -> bool:
        """True where elements are codes."""
        return self.kind in CODE_BITS

    @property
    def code_bytes(self) -> int:
        """Bytes of a chunk's elements."""
        bits = 16 if self.kind == 17 else self.kind
        return TILE * CHUNK * bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a chunk's scales and biases."""
        if not self.quantized:
            return 0
        groups, pair = CHUNK // self.group, TILE * (4 if self.has_bias else 2)
        if self.scale == TWO_LEVELS:
            return pair + groups * TILE * (12 if self.has_bias else 8) // 8
        return groups * pair

    @property
    def piece_chunks(self) -> int:
        """Chunks that are copied together: a slice, or about 4 KB where that is more."""
        most = max(1, 4096 // self.code_bytes)
        return max(
            size for size in range(1, self.chunks + 1) if self.chunks % size == 0 and size <= most
        )

    @property
    def piece_bytes(self) -> int:
        """Bytes that are copied together."""
        return self.piece_chunks * (self.code_bytes + self.scale_bytes)

    @property
    def num_chunks(self) -> int:
        """Chunks along K, padding included."""
        return self.splits * self.warps * self.chunks

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of outputs."""
        return self.num_chunks * (self.code_bytes + self.scale_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed matrix."""
        return self.tiles * self.tile_bytes

    def defines(self) -> dict[str, int]:
        """Return the macros of `linear_layout.cuh`, those of the pipeline excepted."""
        return {
            "KIND": self.kind,
            "GROUP": self.group,
            "ZERO": self.zero,
            "HAS_BIAS": int(self.has_bias),
            "SCALE": self.scale,
            "CHUNKS": self.chunks,
            "WARPS": self.warps,
            "SPLITS": self.splits,
            "PIECE_CHUNKS": self.piece_chunks,
        }


def cut_columns(k: int) -> tuple[int, int, int]:
    """Return (splits, warps, chunks) for K columns: the least padding, then about 12 warps.

    A block can work on two spans side by side, so one of several spans has half the warps.

    Raises:
        LoadError: more columns than eight blocks of a cluster hold.
    """
    needed = -(-k // CHUNK)
    cuts = []
    for splits in _SPLITS:
        side = min(splits, 2)
        for chunks in range(1, _MAX_CHUNKS + 1):
            warps = -(-needed // (splits * chunks))
            if side * warps <= MAX_WARPS and warps * chunks <= _SPAN_CHUNKS:
                off = abs(side * warps - _GOOD_WARPS)
                cuts.append((splits * warps * chunks, off, splits, warps, chunks))
    if not cuts:
        most = CHUNK * _SPLITS[-1] * _SPAN_CHUNKS
        raise LoadError(f"a matrix may have up to {most} columns on cuda, got {k}")
    fewest = min(cut[2] for cut in cuts)
    # Of two as good, more warps: then fewer inputs fill a warp's registers.
    best = min((cut for cut in cuts if cut[2] == fewest), key=lambda cut: (*cut[:3], -cut[3]))
    return best[2:]


def layout_of(part: Tensor, n: int | None = None) -> Layout:
    """Return the layout of a canonical matrix, or of `n` outputs like it.

    Raises:
        LoadError: a kind of matrix that the kernels do not read.
    """
    rows, k = part.shape
    if isinstance(part, QuantizedTensor):
        if part.bits not in CODE_BITS or part.group not in GROUPS:
            raise LoadError(
                "the cuda back end takes codes of 4, 5, 6 or 8 bits in groups of "
                f"{', '.join(map(str, GROUPS))}, got {part.bits} bits in groups of {part.group}"
            )
        scale = _scale_kind(part)
        kind, group, zero = part.bits, min(part.group, CHUNK), part.zero
        has_bias = part.bias is not None
    else:
        if k % 8:
            raise LoadError(f"columns must be a multiple of 8 on cuda, got {k}")
        kind, group, zero, has_bias = DENSE_KINDS[part.dtype], CHUNK, 0, False
        scale = DENSE_KINDS["f16"]
    splits, warps, chunks = cut_columns(k)
    return Layout(
        n=rows if n is None else n,
        k=k,
        kind=kind,
        group=group,
        zero=zero,
        has_bias=has_bias,
        scale=scale,
        splits=splits,
        warps=warps,
        chunks=chunks,
    )


def _scale_kind(part: QuantizedTensor) -> int:
    """Return the kind of a matrix's scales and biases.

    Raises:
        LoadError: one that the kernels do not read.
    """
    found = {_number_kind(item) for item in (part.scale, part.bias) if item is not None}
    two_levels = found == {TWO_LEVELS}
    # Of two levels the kernels read those that the K-quants have.
    shape = (part.bits, part.group, part.bias is not None)
    if (
        len(found) != 1
        or 0 in found
        or (two_levels and shape not in ((4, 32, True), (5, 32, True), (6, 16, False)))
    ):
        raise LoadError(
            "the cuda back end takes scales and biases of float16 or bfloat16, or of two levels "
            f"as Q4_K, Q5_K and Q6_K have them, got others of {part.bits} bits in groups of "
            f"{part.group}"
        )
    return found.pop()


def _number_kind(numbers: GroupNumbers) -> int:
    if isinstance(numbers, TwoLevel):
        return TWO_LEVELS
    if isinstance(numbers, BFloat16):
        return DENSE_KINDS["bf16"]
    return DENSE_KINDS["f16"] if float16_numbers(numbers) is not None else 0
