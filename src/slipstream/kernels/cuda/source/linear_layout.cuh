// How a packed matrix lies in memory; `layout.py` writes it and explains it.
//
// Macros: KIND (codes of 4, 5, 6 and 8 bits, 16 bfloat16, 17 float16, 32 float32), GROUP, ZERO,
// HAS_BIAS and SCALE (16 bfloat16, 17 float16, 2 two levels) of codes, CHUNKS (of 64 columns in a warp's slice), WARPS (slices in a span), SPLITS (spans along K),
// PIECE_CHUNKS (chunks that travel together). How a kernel shares the spans out: BLOCKS (of a cluster),
// SIDE (spans that a block works on side by side).
#pragma once

#include "types.cuh"

constexpr bool QUANTIZED = KIND <= 8;
constexpr bool TWO_LEVELS = SCALE == 2;
constexpr int TILE = 16;               // output rows of an mma
constexpr int CHUNK = 64;              // columns
constexpr int STEPS = CHUNK / 16;      // mma steps of a chunk
constexpr int GROUPS = QUANTIZED ? CHUNK / GROUP : 1;  // groups of a chunk
constexpr int GROUP_STEPS = STEPS / GROUPS;
constexpr int BITS = KIND == 17 ? 16 : KIND;
constexpr int CHUNK_CODE_BYTES = TILE * CHUNK * BITS / 8;
// A group's scales; of two levels only the small one, 6 bits each with a bias and 8 without.
constexpr int GROUP_SCALE_BYTES = !QUANTIZED   ? 0
                                  : TWO_LEVELS ? TILE * (HAS_BIAS ? 12 : 8) / 8
                                               : TILE * 2 * (1 + HAS_BIAS);
constexpr int SUPER_BYTES = TWO_LEVELS ? TILE * 2 * (1 + HAS_BIAS) : 0;
constexpr int CHUNK_SCALE_BYTES = SUPER_BYTES + GROUPS * GROUP_SCALE_BYTES;
constexpr int LOW_CODE_BYTES = TILE * CHUNK / 2;  // of 5 and 6 bits: nibbles, then what is above them
constexpr int PIECES = CHUNKS / PIECE_CHUNKS;
constexpr int PIECE_BYTES = PIECE_CHUNKS * (CHUNK_CODE_BYTES + CHUNK_SCALE_BYTES);
constexpr int LAYER_BYTES = WARPS * PIECE_BYTES;  // one piece of every slice of a span
constexpr int SPAN_BYTES = PIECES * LAYER_BYTES;
constexpr int RUN = GROUP == 16 ? 16 : 32;  // columns of which each of four lanes holds a quarter
static_assert(CHUNKS % PIECE_CHUNKS == 0, "a slice holds whole pieces");

// What is missing from scale * (code - ZERO) + bias once a group's products of scale and code are
// summed: (bias - ZERO * scale) times the group's sum of inputs.
constexpr bool HAS_OFFSET = QUANTIZED && (HAS_BIAS || ZERO != 0);

// Blocks of a cluster share out the spans; a block takes its own in turn, SIDE at a time.
constexpr bool CLUSTERED = BLOCKS > 1;
constexpr int OWN_TURNS = SPLITS / (BLOCKS * SIDE);
static_assert(OWN_TURNS * BLOCKS * SIDE == SPLITS, "blocks have equal parts of K");
