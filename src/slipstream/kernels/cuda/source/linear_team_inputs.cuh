// Inputs of a block of teams: from rows in global memory to B operands of wgmma in shared memory.
#pragma once

#include "linear_team_block.cuh"

constexpr int AHEAD = 2;  // slices whose inputs a team has asked for before it lays one out

// Describe the B operand of one step: core matrices of 128 bytes, two along K, then `tiles` of rows.
__device__ __forceinline__ u64 describe(const char* inputs) {
  constexpr u64 along_k = CORE_BYTES >> 4, along_rows = 2 * CORE_BYTES >> 4;
  return u64(shared_address(inputs) >> 4 & 0x3FFF) | along_k << 16 | along_rows << 32;
}

// One lane's inputs of a chunk for one tile of rows, in the order of the steps' B operands. Where they
// will lie, 256 bytes a step, they first arrive as they are: each lane's runs of 16 or 8 bytes.
struct ChunkWords {
  u32 words[STEPS][2];

  static constexpr int RUN_BYTES = RUN / 4 * 2;
  static constexpr int SIDE_RUNS = 2 * CORE_BYTES / RUN_BYTES;  // of a step's 256 bytes

  // Where run `run` of a lane arrives; `stride` bytes are between steps.
  static __device__ __forceinline__ char* place(char* inputs, int stride, int run, int lane) {
    const int at = run * 32 + lane;
    return inputs + at / SIDE_RUNS * stride + at % SIDE_RUNS * RUN_BYTES;
  }

  __device__ __forceinline__ void read(char* inputs, int stride, int lane) {
#pragma unroll
    for (int run = 0; run < CHUNK / RUN; ++run) {
      const char* from = place(inputs, stride, run, lane);
      if constexpr (RUN == 32) {
        const uint4 values = *reinterpret_cast<const uint4*>(from);
        words[2 * run][0] = values.x, words[2 * run][1] = values.y;
        words[2 * run + 1][0] = values.z, words[2 * run + 1][1] = values.w;
      } else {
        const uint2 values = *reinterpret_cast<const uint2*>(from);
        words[run][0] = values.x, words[run][1] = values.y;
      }
    }
  }

  __device__ __forceinline__ void write(char* inputs, int stride, int lane) const {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32* to = reinterpret_cast<u32*>(inputs + step * stride) + lane;
      to[0] = words[step][0], to[CORE_BYTES / 4] = words[step][1];
    }
  }

  __device__ __forceinline__ void load(int, int step, u32 (&b)[2]) const {
    b[0] = words[step][0], b[1] = words[step][1];
  }
};

// The inputs of a slice are the work of the team that multiplies it first: `fetch` asks for them, and
// `lay_out` scales them, brings them into order and sums them by groups once they are there. Each
// warp does every fourth pair of a chunk and a tile of rows, and reads only what it asked for itself.
template <int tiles>
struct SliceInputs {
  static constexpr int pairs = CHUNKS * tiles, most = (pairs + 3) / 4;
  static constexpr int stride = tiles * 2 * CORE_BYTES;  // between steps

  const Block<tiles>& block;
  const u16* x;
  int k, rows, warp, lane;

  __device__ __forceinline__ char* place(int own, int pair) const {
    const int chunk = own * CHUNKS + pair / tiles;
    return block.inputs + chunk * STEPS * stride + pair % tiles * 2 * CORE_BYTES;
  }

  __device__ __forceinline__ void fetch(int own) const {
#pragma unroll
    for (int u = 0; u < most; ++u) {
      const int pair = u * 4 + warp % 4;
      if (pair >= pairs) break;
      const int chunk = block.rank * OWN_CHUNKS + own * CHUNKS + pair / tiles;
      const int row = pair % tiles * 8 + (lane >> 2), column = chunk * CHUNK + (lane & 3) * RUN / 4;
#pragma unroll
      for (int run = 0; run < CHUNK / RUN; ++run) {
        const bool valid = row < rows && column + run * RUN < k;
        copy_run<ChunkWords::RUN_BYTES>(
            ChunkWords::place(place(own, pair), stride, run, lane),
            valid ? x + size_t(row) * k + column + run * RUN : x, valid);
      }
    }
  }

  __device__ __forceinline__ void lay_out(int own) const {
    constexpr int at_once = most <= 5 ? most : (most + 1) / 2;
#pragma unroll
    for (int first = 0; first < most; first += at_once) {
      ChunkWords some[at_once];
#pragma unroll
      for (int u = 0; u < at_once; ++u) {
        const int pair = (first + u) * 4 + warp % 4;
        if (pair < pairs) some[u].read(place(own, pair), stride, lane);
      }
      __syncwarp();  // all lanes have read what is written to now
#pragma unroll
      for (int u = 0; u < at_once; ++u) {
        const int pair = (first + u) * 4 + warp % 4;
        if (pair >= pairs) break;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
          scale_inputs(some[u].words[step][0], some[u].words[step][1]);
        some[u].write(place(own, pair), stride, lane);
        if constexpr (HAS_OFFSET)
          sum_inputs<tiles>(some[u], pair % tiles,
                            block.input_sums + (own * CHUNKS + pair / tiles) * GROUPS * tiles * 8,
                            lane);
      }
    }
    order_before_copies();  // the tensor cores read them another way
    pass(block.ready + own, lane);
  }
};
