// What a block of teams shares: its shared memory, and which slices, groups and stages are whose.
#pragma once

#include "async.cuh"
#include "linear_inner.cuh"

constexpr int TEAM_TILES = 4;  // a warpgroup's outputs: one tile for each of its warps
constexpr int TEAM_THREADS = 128;
constexpr int TEAM_WARPS = TEAMS * 4;
constexpr int THREADS = TEAMS * TEAM_THREADS + 32;  // and a warp that copies
constexpr int STAGE_BYTES = TEAM_TILES * PIECE_BYTES;
constexpr int SPAN_CHUNKS = WARPS * CHUNKS;
constexpr int OWN_CHUNKS = OWN_TURNS * SPAN_CHUNKS;
constexpr int UNITS = OWN_TURNS * WARPS;  // slices of a group that a block multiplies
// Sums of a group that a block keeps: of the span so far, and of the spans before.
constexpr int KEPT = !CLUSTERED && OWN_TURNS > 1 ? 2 : 1;
constexpr int CORE_BYTES = 128;  // 8 rows by 8 columns of bfloat16

// A barrier's parity tells a lap of the ring from the next, no more. A team that begins a slice knows
// that the one it had before has arrived, and all before that, so a lap before must lie no later.
static_assert(STAGES >= TEAMS * PIECES, "no team is a lap ahead of the copies");
// Nor of sums on their way: each group takes all teams, so one that waits holds up the next group.
static_assert(!CLUSTERED || (UNITS >= TEAMS && SLOTS >= 2), "no team is a lap ahead of the sums");

template <int tiles>
struct Block {
  static constexpr int input_bytes = OWN_CHUNKS * STEPS * tiles * 2 * CORE_BYTES;
  static constexpr int sums_size = HAS_OFFSET ? OWN_CHUNKS * GROUPS * tiles * 8 : 0;
  static constexpr int parts = tiles * 4;  // of a group: a warp's outputs, a tile of rows
  static constexpr int own_parts = CLUSTERED ? (parts + BLOCKS - 1) / BLOCKS : 0;
  static constexpr int item_size = tiles * TEAM_THREADS;  // float4 of a group's sums

  char* ring;         // (STAGES, STAGE_BYTES)
  char* inputs;       // (OWN_CHUNKS, STEPS, tiles, 2, CORE_BYTES)
  float4* items;      // (KEPT, tiles, TEAM_THREADS): of the span so far, of the spans before
  float4* inbox;      // (SLOTS, own_parts, SPLITS, 32): the spans' sums of parts that are ours to add
  float* input_sums;  // (OWN_CHUNKS, GROUPS, tiles, 8)
  u64 *full, *empty;  // STAGES each
  u64* passed;        // TEAM_WARPS: this warp has added its slice
  u64* ready;         // UNITS: the inputs of this slice are laid out
  u64* sent;          // (SLOTS, own_parts): the sums of all spans are there
  u64* taken;         // SLOTS: all blocks have added up what lay there

  int rank, worker, workers, num_tiles, own_groups;

  __device__ __forceinline__ Block(char* shared, int n) {
    inputs = shared;
    ring = inputs + input_bytes;
    items = reinterpret_cast<float4*>(ring + STAGES * STAGE_BYTES);
    inbox = items + KEPT * item_size;
    input_sums = reinterpret_cast<float*>(inbox + SLOTS * own_parts * SPLITS * 32);
    full = reinterpret_cast<u64*>(input_sums + sums_size);
    empty = full + STAGES;
    passed = empty + STAGES;
    ready = passed + TEAM_WARPS;
    sent = ready + UNITS;
    taken = sent + SLOTS * own_parts;
    rank = blockIdx.x % BLOCKS, worker = blockIdx.x / BLOCKS, workers = gridDim.x / BLOCKS;
    num_tiles = (n + TILE - 1) / TILE;
    const int groups = (num_tiles + TEAM_TILES - 1) / TEAM_TILES;
    own_groups = (groups - worker + workers - 1) / workers;
  }

  __device__ __forceinline__ int first_tile(int group) const {
    return (worker + group * workers) * TEAM_TILES;
  }
};

struct Stage {
  int at = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance(int by) {
    at += by;
    if (at >= STAGES) at -= STAGES, parity ^= 1;
  }
};

// Say that this warp is done with what the barrier guards.
__device__ __forceinline__ void pass(u64* barrier, int lane) {
  __syncwarp();
  if (lane == 0) arrive(barrier);
}
