// y = x W^T for few rows: `multirow` reads the weights once for 8 or 16 rows, `gemv` once per row.
//
// A block stays on its multiprocessor and walks output tiles of 16. Warp w owns slice w of K: it
// keeps that slice of the inputs in registers, its weights arrive through a ring of its own, and the
// slices' sums meet in shared memory, added from the first to the last. Blocks of a cluster own
// consecutive spans of K and add their sums in the same order. Weights depend on no kernel, so the
// rings fill before the previous kernel has finished.
//
// Each y of the grid serves `rows_per_pass` rows: 1 for gemv, 8 * tiles for multirow.

#include "async.cuh"
#include "linear_inner.cuh"

constexpr int THREADS = WARPS * 32;
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

// Where this warp's pieces lie, in the order in which it reads them.
struct Pieces {
  const char* weight;
  int first_tile, tile_step, num_tiles, split, warp;
  int tile, piece = 0, left;

  __device__ __forceinline__ Pieces(const char* weight, int first_tile, int tile_step,
                                    int num_tiles, int split, int warp, int own_tiles)
      : weight(weight), first_tile(first_tile), tile_step(tile_step), num_tiles(num_tiles),
        split(split), warp(warp), tile(first_tile), left(own_tiles * OWN_SPLITS * PIECES) {}

  __device__ __forceinline__ const char* next() {
    if (left == 0) return nullptr;
    --left;
    const size_t slice = (size_t(tile) * SPLITS + split) * WARPS + warp;
    const char* at = weight + slice * SLICE_BYTES + piece * PIECE_BYTES;
    if (++piece == PIECES) {
      piece = 0;
      tile += tile_step;
      if (tile >= num_tiles) {
        tile = first_tile;
        ++split;
      }
    }
    return at;
  }
};

template <int tiles>
__global__ void __launch_bounds__(THREADS, 1)
    multirow(const char* weight, const u16* x, float* out, const float* residual, int n, int k,
             int out_stride, int num_rows, int rows_per_pass) {
  constexpr int slot = tiles * 8 * SLOT_ROW;
  constexpr int sums_size = HAS_OFFSET ? CHUNKS * GROUPS * tiles * 8 : 0;
  constexpr int outputs = (tiles * 8 * TILE + THREADS - 1) / THREADS;  // of one thread and tile

  extern __shared__ __align__(128) char shared[];
  using WarpRing = Ring<STAGES, PIECE_BYTES>;
  u64* barriers = reinterpret_cast<u64*>(shared + WARPS * WarpRing::shared_bytes);
  float* slots = reinterpret_cast<float*>(barriers + WARPS * STAGES);  // (2, WARPS, slot)
  float* all_sums = slots + 2 * WARPS * slot;                          // (WARPS, sums_size)
  float* block_sums = all_sums + WARPS * sums_size;  // (OWN_SPLITS, own tiles, rows, TILE)

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int blocks = CLUSTERED ? SPLITS : 1;  // that share a tile
  const int rank = blockIdx.x % blocks, worker = blockIdx.x / blocks;
  const int workers = gridDim.x / blocks;
  const int num_tiles = (n + TILE - 1) / TILE;
  const int own_tiles = (num_tiles - worker + workers - 1) / workers;

  WarpRing ring(shared + warp * WarpRing::shared_bytes, barriers + warp * STAGES, lane);
  Pieces pieces(weight, worker, workers, num_tiles, rank, warp, own_tiles);
  for (int stage = 0; stage < STAGES; ++stage) ring.fill(pieces.next());

  allow_next_kernel();
  wait_for_previous_kernel();

  const int first_row = blockIdx.y * rows_per_pass;
  const int rows = min(rows_per_pass, num_rows - first_row);
  x += size_t(first_row) * k;
  out += size_t(first_row) * out_stride;
  if (residual != nullptr) residual += size_t(first_row) * out_stride;
  float* input_sums = all_sums + warp * sums_size;

  int parity = 0;
  for (int own_split = 0; own_split < OWN_SPLITS; ++own_split) {
    const int split = rank + own_split;
    Inputs<tiles> inputs;
    inputs.read(x, (split * WARPS + warp) * CHUNKS * CHUNK, k, rows, lane);
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

    for (int own = 0; own < own_tiles; ++own) {
      const int first_output = (worker + own * workers) * TILE;
      float before[outputs];
      if constexpr (SPLITS == 1) {
#pragma unroll
        for (int i = 0; i < outputs; ++i) {
          const int at = threadIdx.x + i * THREADS, output = first_output + at % TILE;
          before[i] = 0.0f;
          if (residual != nullptr && at < rows * TILE && output < n)
            before[i] = residual[size_t(at / TILE) * out_stride + output];
        }
      }

      float sum[tiles][4] = {};
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        const char* codes = ring.wait();
        const char* scales = codes + PIECE_CHUNKS * CHUNK_CODE_BYTES;
#pragma unroll
        for (int i = 0; i < PIECE_CHUNKS; ++i) {
          const int chunk = piece * PIECE_CHUNKS + i;
          multiply_chunk<tiles>(codes + i * CHUNK_CODE_BYTES, scales + i * CHUNK_SCALE_BYTES,
                                ChunkInputs<tiles>{inputs, chunk},
                                input_sums + chunk * GROUPS * tiles * 8, lane, sum);
        }
        ring.release();
        ring.fill(pieces.next());
      }

      float* own_slots = slots + parity * WARPS * slot;
      float* to = own_slots + warp * slot;
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to[(tile * 8 + 2 * (lane & 3) + (i & 1)) * SLOT_ROW + (lane >> 2) + 8 * (i >> 1)] =
              sum[tile][i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < outputs; ++i) {
        const int at = threadIdx.x + i * THREADS, row = at / TILE, output = at % TILE;
        if (at >= rows * TILE) continue;
        const float* from = own_slots + row * SLOT_ROW + output;
        float total = from[0];
#pragma unroll
        for (int other = 1; other < WARPS; ++other) total += from[other * slot];
        if constexpr (SPLITS > 1)
          block_sums[(own_split * own_tiles + own) * rows * TILE + at] = total;
        else if (first_output + output < n)
          out[size_t(row) * out_stride + first_output + output] =
              residual != nullptr ? total + before[i] : total;
      }
      parity ^= 1;
    }
  }

  if constexpr (SPLITS > 1) {
    if constexpr (CLUSTERED) meet_cluster();
    else __syncthreads();
    const int size = own_tiles * rows * TILE;
    for (int at = threadIdx.x + rank * THREADS; at < size; at += THREADS * blocks) {
      const int row = at / TILE % rows, own = at / (rows * TILE);
      const int output = (worker + own * workers) * TILE + at % TILE;
      if (output >= n) continue;
      float total = CLUSTERED ? read_cluster(block_sums + at, 0) : block_sums[at];
      for (int split = 1; split < SPLITS; ++split)
        total += CLUSTERED ? read_cluster(block_sums + at, split) : block_sums[split * size + at];
      const size_t to = size_t(row) * out_stride + output;
      out[to] = residual != nullptr ? total + residual[to] : total;
    }
    if constexpr (CLUSTERED) meet_cluster();  // others may still read this block's sums
  }
}
