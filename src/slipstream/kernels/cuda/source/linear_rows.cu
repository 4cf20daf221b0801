// y = x W^T for few rows: `multirow` reads the weights once for up to 32 rows, `gemv` once per row.
//
// A block stays on its multiprocessor and walks output tiles of 16. One warp copies: a ring of stages,
// each a piece of every slice of a tile, filled as fast as it is emptied. SIDE times WARPS warps
// multiply: each owns a slice of K and keeps that slice of the inputs in registers. One warp adds the
// slices' sums, from the first to the last, and writes the outputs. What a block does not hold of K
// is left to the other blocks of its cluster, or to a later turn over the same tiles; then the spans'
// sums stay in shared memory until all are there, and are added in the same order.
//
// Each y of the grid serves `rows_per_pass` rows: 1 for gemv, 8 * tiles for multirow.

#include "async.cuh"
#include "linear_inner.cuh"

constexpr int SLICES = SIDE * WARPS;  // of a block at a time
constexpr int THREADS = (SLICES + 2) * 32;
constexpr int STAGE_BYTES = SIDE * LAYER_BYTES;
constexpr int STAGE_COPIES = PIECES == 1 ? 1 : SIDE;  // spans of a tile lie one behind the other
constexpr bool ADDS_ALL = SIDE == SPLITS;  // the slices of a block are all that there are
constexpr int SETS = 2;  // of slots, so that warps may run a tile ahead of the sum
constexpr int SLOT_ROW = 20;  // floats between rows of a slice's sums; 16 would collide in banks

template <int tiles>
struct Inputs {
  u32 words[tiles][CHUNKS * STEPS][2];

  // Read this warp's slice of the inputs, each lane its share of one row; zeros beyond the matrix.
  __device__ __forceinline__ void read(const u16* x, int column, int k, int rows, int lane) {
    constexpr int share = RUN / 4;
    const int first = column + (lane & 3) * share;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int row = tile * 8 + (lane >> 2);
      const u16* from = x + size_t(row) * k + first;
#pragma unroll
      for (int run = 0; run < CHUNKS * CHUNK / RUN; ++run) {
        const bool valid = row < rows && first + run * RUN < k;
        if constexpr (RUN == 32) {
          uint4 values = make_uint4(0, 0, 0, 0);
          if (valid) values = *reinterpret_cast<const uint4*>(from + run * RUN);
          words[tile][2 * run][0] = values.x, words[tile][2 * run][1] = values.y;
          words[tile][2 * run + 1][0] = values.z, words[tile][2 * run + 1][1] = values.w;
        } else {
          uint2 values = make_uint2(0, 0);
          if (valid) values = *reinterpret_cast<const uint2*>(from + run * RUN);
          words[tile][run][0] = values.x, words[tile][run][1] = values.y;
        }
      }
#pragma unroll
      for (int step = 0; step < CHUNKS * STEPS; ++step)
        scale_inputs(words[tile][step][0], words[tile][step][1]);
    }
  }
};

// The inputs of one chunk of the slice.
template <int tiles>
struct ChunkInputs {
  const Inputs<tiles>& inputs;
  int chunk;

  __device__ __forceinline__ void load(int tile, int step, u32 (&b)[2]) const {
    b[0] = inputs.words[tile][chunk * STEPS + step][0];
    b[1] = inputs.words[tile][chunk * STEPS + step][1];
  }
};

// Load the first `left` of four floats, as one vector where `whole`.
__device__ __forceinline__ void load_4(float (&values)[4], const float* from, int left,
                                       bool whole) {
  if (whole) {
    const float4 vector = *reinterpret_cast<const float4*>(from);
    values[0] = vector.x, values[1] = vector.y, values[2] = vector.z, values[3] = vector.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < left) values[i] = from[i];
  }
}

__device__ __forceinline__ void store_4(float* to, const float (&values)[4], int left,
                                        bool whole) {
  if (whole) {
    *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < left) to[i] = values[i];
  }
}

// What the roles of a block share.
template <int tiles>
struct Block {
  static constexpr int slot = tiles * 8 * SLOT_ROW;  // floats of a slice's sums
  static constexpr int sums_size = HAS_OFFSET ? CHUNKS * GROUPS * tiles * 8 : 0;

  char* ring;           // (STAGES, STAGE_BYTES)
  u64 *full, *empty;    // STAGES each
  u64 *written, *read;  // SETS each: slots hold all slices' sums; they have been added
  float* slots;         // (SETS, SLICES, slot)
  float* input_sums;    // (SLICES, sums_size)
  float* block_sums;    // (OWN_TURNS, own tiles, SIDE, rows, TILE), unless ADDS_ALL

  int rank, worker, workers, num_tiles, own_tiles, rows;

  __device__ __forceinline__ Block(char* shared, int n, int rows) : rows(rows) {
    ring = shared;
    full = reinterpret_cast<u64*>(shared + STAGES * STAGE_BYTES);
    empty = full + STAGES;
    written = empty + STAGES;
    read = written + SETS;
    slots = reinterpret_cast<float*>(read + SETS);
    input_sums = slots + SETS * SLICES * slot;
    block_sums = input_sums + SLICES * sums_size;
    rank = blockIdx.x % BLOCKS, worker = blockIdx.x / BLOCKS, workers = gridDim.x / BLOCKS;
    num_tiles = (n + TILE - 1) / TILE;
    own_tiles = (num_tiles - worker + workers - 1) / workers;
  }

  // Tiles in the order of work: all for the first SIDE spans, then all for the next.
  __device__ __forceinline__ int turns() const { return own_tiles * OWN_TURNS; }
  __device__ __forceinline__ int split(int turn) const {
    return (rank * OWN_TURNS + (OWN_TURNS == 1 ? 0 : turn / own_tiles)) * SIDE;
  }
  __device__ __forceinline__ int tile(int turn) const {
    return worker + (OWN_TURNS == 1 ? turn : turn % own_tiles) * workers;
  }
};

// A place in a ring, and the parity of the barrier phase that it waits for.
template <int size>
struct Place {
  int at = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++at == size) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Fill the ring, from the first stage to the last, as stages become empty.
template <int tiles>
__device__ __forceinline__ void copy_weights(const Block<tiles>& block, const char* weight,
                                             int lane) {
  const Copier copier(lane, gridDim.y == 1);
  Place<STAGES> stage;
  for (int turn = 0; turn < block.turns(); ++turn) {
    const char* from =
        weight + (size_t(block.tile(turn)) * SPLITS + block.split(turn)) * SPAN_BYTES;
    for (int piece = 0; piece < PIECES; ++piece) {
      wait_barrier(block.empty + stage.at, stage.parity ^ 1);
      order_before_copies();
      char* to = block.ring + stage.at * STAGE_BYTES;
#pragma unroll
      for (int side = 0; side < STAGE_COPIES; ++side)
        copier.copy(to + side * LAYER_BYTES, from + side * SPAN_BYTES + piece * LAYER_BYTES,
                    STAGE_BYTES / STAGE_COPIES, block.full + stage.at);
      stage.advance();
    }
  }
}

// Multiply one slice of every tile.
template <int tiles>
__device__ __forceinline__ void multiply_slices(const Block<tiles>& block, const u16* x, int k,
                                                int warp, int lane) {
  float* input_sums = block.input_sums + warp * block.sums_size;
  float* slot = block.slots + warp * block.slot + 2 * (lane & 3) * SLOT_ROW + (lane >> 2);
  Place<STAGES> stage;
  Place<SETS> set;
  for (int own_turn = 0; own_turn < OWN_TURNS; ++own_turn) {
    Inputs<tiles> inputs;
    inputs.read(x, ((block.rank * OWN_TURNS + own_turn) * SLICES + warp) * CHUNKS * CHUNK, k,
                block.rows, lane);
    if constexpr (HAS_OFFSET) {
      __syncwarp();
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile)
          sum_inputs<tiles>(ChunkInputs<tiles>{inputs, chunk}, tile,
                            input_sums + chunk * GROUPS * tiles * 8, lane);
      __syncwarp();
    }

    for (int left = block.own_tiles; left > 0; --left) {
      float sum[tiles][4] = {};
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        wait_barrier(block.full + stage.at, stage.parity);
        const char* codes = block.ring + stage.at * STAGE_BYTES + warp * PIECE_BYTES;
        const char* scales = codes + PIECE_CHUNKS * CHUNK_CODE_BYTES;
#pragma unroll
        for (int i = 0; i < PIECE_CHUNKS; ++i) {
          const int chunk = piece * PIECE_CHUNKS + i;
          multiply_chunk<tiles>(codes + i * CHUNK_CODE_BYTES, scales + i * CHUNK_SCALE_BYTES,
                                ChunkInputs<tiles>{inputs, chunk},
                                input_sums + chunk * GROUPS * tiles * 8, lane, sum);
        }
        __syncwarp();
        if (lane == 0) arrive(block.empty + stage.at);
        stage.advance();
      }
      finish_slice(sum);

      wait_barrier(block.read + set.at, set.parity ^ 1);
      float* to = slot + set.at * SLICES * block.slot;
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to[(tile * 8 + (i & 1)) * SLOT_ROW + 8 * (i >> 1)] = sum[tile][i];
      __syncwarp();
      if (lane == 0) arrive(block.written + set.at);
      set.advance();
    }
  }
}

// Add four outputs' sums of one row and the slices of one span, from the first to the last.
__device__ __forceinline__ void add_span(const float* from, int slot, float (&total)[4]) {
#pragma unroll
  for (int slice = 0; slice < WARPS; ++slice) {
    const float4 sums = *reinterpret_cast<const float4*>(from + slice * slot);
    total[0] = slice == 0 ? sums.x : total[0] + sums.x;
    total[1] = slice == 0 ? sums.y : total[1] + sums.y;
    total[2] = slice == 0 ? sums.z : total[2] + sums.z;
    total[3] = slice == 0 ? sums.w : total[3] + sums.w;
  }
}

// Add the slices' sums of every tile; a lane adds four outputs of a row.
template <int tiles>
__device__ __forceinline__ void add_slices(const Block<tiles>& block, float* out,
                                           const float* residual, int n, int out_stride,
                                           int residual_stride, int lane) {
  const int first = lane % 4 * 4;
  const bool vectors =
      (reinterpret_cast<size_t>(out) | reinterpret_cast<size_t>(residual)) % 16 == 0 &&
      (out_stride | residual_stride) % 4 == 0;
  for (int turn = 0; turn < block.turns(); ++turn) {
    const int set = turn % SETS, output = block.tile(turn) * TILE + first;
    const bool whole = vectors && output + 4 <= n;
    float before[tiles][4] = {};
    if (ADDS_ALL && residual != nullptr) {
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        const int row = tile * 8 + lane / 4;
        const float* from = residual + size_t(row) * residual_stride + output;
        if (row < block.rows) load_4(before[tile], from, n - output, whole);
      }
    }
    wait_barrier(block.written + set, turn / SETS & 1);
    float total[tiles][ADDS_ALL ? 1 : SIDE][4];
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int row = tile * 8 + lane / 4;
      if (row >= block.rows) continue;
      const float* from = block.slots + set * SLICES * block.slot + row * SLOT_ROW + first;
      add_span(from, block.slot, total[tile][0]);
#pragma unroll
      for (int side = 1; side < SIDE; ++side) {
        float span[4];
        add_span(from + side * WARPS * block.slot, block.slot, span);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (ADDS_ALL) total[tile][0][i] += span[i];
          else total[tile][side][i] = span[i];
        }
      }
    }
    __syncwarp();
    if (lane == 0) arrive(block.read + set);
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int row = tile * 8 + lane / 4;
      if (row >= block.rows) continue;
      if constexpr (ADDS_ALL) {
        if (residual != nullptr)
#pragma unroll
          for (int i = 0; i < 4; ++i) total[tile][0][i] += before[tile][i];
        store_4(out + size_t(row) * out_stride + output, total[tile][0], n - output, whole);
      } else {
#pragma unroll
        for (int side = 0; side < SIDE; ++side)
          store_4(block.block_sums + ((turn * SIDE + side) * block.rows + row) * TILE + first,
                  total[tile][side], 4, true);
      }
    }
  }
}

// Add the spans' sums of every tile, each block of the cluster a share of the outputs.
template <int tiles>
__device__ __forceinline__ void add_spans(const Block<tiles>& block, float* out,
                                          const float* residual, int n, int out_stride,
                                          int residual_stride) {
  const int tile_size = block.rows * TILE, size = block.own_tiles * tile_size;
  for (int at = threadIdx.x + block.rank * THREADS; at < size; at += THREADS * BLOCKS) {
    const int turn = at / tile_size, within = at % tile_size;
    const int output = block.tile(turn) * TILE + within % TILE;
    if (output >= n) continue;
    float total = 0;
#pragma unroll
    for (int split = 0; split < SPLITS; ++split) {
      const int own_turn = split / SIDE % OWN_TURNS;
      const float* sums = block.block_sums + within +
                          ((own_turn * block.own_tiles + turn) * SIDE + split % SIDE) * tile_size;
      const float sum = CLUSTERED ? read_cluster(sums, split / (SIDE * OWN_TURNS)) : *sums;
      total = split == 0 ? sum : total + sum;
    }
    const int row = within / TILE;
    if (residual != nullptr) total += residual[size_t(row) * residual_stride + output];
    out[size_t(row) * out_stride + output] = total;
  }
}

template <int tiles>
__global__ void __launch_bounds__(THREADS, 1)
    multirow(const char* weight, const u16* x, float* out, const float* residual, int n, int k,
             int out_stride, int residual_stride, int num_rows, int rows_per_pass) {
  extern __shared__ __align__(128) char shared[];
  const int first_row = blockIdx.y * rows_per_pass;
  const int rows = min(rows_per_pass, num_rows - first_row);
  const Block<tiles> block(shared, n, rows);
  x += size_t(first_row) * k;
  out += size_t(first_row) * out_stride;
  if (residual != nullptr) residual += size_t(first_row) * residual_stride;

  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // known to be the same in all lanes
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(block.full + stage, COPY_ARRIVALS * STAGE_COPIES);
      init_barrier(block.empty + stage, SLICES);
    }
    for (int set = 0; set < SETS; ++set) {
      init_barrier(block.written + set, SLICES);
      init_barrier(block.read + set, 1);
    }
    publish_barriers();
  }
  __syncthreads();
  allow_next_kernel();

  if (warp == SLICES) {
    copy_weights(block, weight, lane);
    wait_for_previous_kernel();
  } else {
    wait_for_previous_kernel();
    if (warp < SLICES) multiply_slices(block, x, k, warp, lane);
    else add_slices(block, out, residual, n, out_stride, residual_stride, lane);
  }

  if constexpr (!ADDS_ALL) {
    __syncthreads();
    if constexpr (CLUSTERED) meet_cluster();
    add_spans(block, out, residual, n, out_stride, residual_stride);
    if constexpr (CLUSTERED) meet_cluster();  // others may still read this block's sums
  }
}
