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
#pragma unroll
      for (int step = 0; step < CHUNKS * STEPS; ++step)
        scale_inputs(words[tile][step][0], words[tile][step][1]);
    }
  }
};

// The inputs of the slice from one chunk on.
template <int tiles>
struct ChunkInputs {
  const Inputs<tiles>& inputs;
  int chunk;

  __device__ __forceinline__ void load(int tile, int step, u32 (&b)[2]) const {
    b[0] = inputs.words[tile][chunk * STEPS + step][0];
    b[1] = inputs.words[tile][chunk * STEPS + step][1];
  }
};

// Multiply a piece whose first chunk is the slice's `chunk`, from chunk `at` of it on.
template <int tiles, int at>
__device__ __forceinline__ void multiply_piece(const char* codes, const char* scales,
                                               const Inputs<tiles>& inputs, int chunk,
                                               const float* input_sums, int lane,
                                               float (&sum)[tiles][4]) {
  constexpr int left = PIECE_CHUNKS - at;
  if constexpr (left > 0) {
    constexpr int abreast = tiles == 1 ? ABREAST : (ABREAST + 1) / 2;
    constexpr int chunks = left < abreast ? left : abreast;
    multiply_chunks<tiles, chunks>(codes + at * CHUNK_CODE_BYTES, scales + at * CHUNK_SCALE_BYTES,
                                   ChunkInputs<tiles>{inputs, chunk + at},
                                   input_sums + (chunk + at) * GROUPS * tiles * 8, lane, sum);
    multiply_piece<tiles, at + chunks>(codes, scales, inputs, chunk, input_sums, lane, sum);
  }
}

// Where this warp's pieces lie, in the order in which it reads them: all pieces of a tile, all of the
// block's tiles, all of its splits.
struct Pieces {
  const char* next;
  size_t tile_step, split_step;  // bytes to the next tile, from behind the last tile to the next split
  int own_tiles, tiles_left, pieces_left = PIECES, left;

  __device__ __forceinline__ Pieces(const char* weight, int first_tile, int tile_step, int split,
                                    int warp, int own_tiles)
      : next(weight + ((size_t(first_tile) * SPLITS + split) * WARPS + warp) * SLICE_BYTES),
        tile_step(size_t(tile_step) * SPLITS * WARPS * SLICE_BYTES),
        split_step(size_t(WARPS) * SLICE_BYTES), own_tiles(own_tiles), tiles_left(own_tiles),
        left(own_tiles * OWN_SPLITS * PIECES) {}

  __device__ __forceinline__ void advance() {
    --left;
    next += PIECE_BYTES;
    if (PIECES > 1 && --pieces_left != 0) return;
    pieces_left = PIECES;
    next += tile_step - SLICE_BYTES;
    if (OWN_SPLITS > 1 && --tiles_left == 0) {
      tiles_left = own_tiles;
      next += split_step - own_tiles * tile_step;
    }
  }
};

// The meeting of the slices' sums: two sets of slots, so that warps may run a tile ahead of the sum.
struct Slots {
  float* floats;   // (2, WARPS, rows of a pass, SLOT_ROW)
  u64* full;       // 2: all slices are written
  u64* empty;      // 2: the sums are taken
  int set = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    set ^= 1;
    parity ^= set == 0;
  }
};

template <int tiles>
__global__ void __launch_bounds__(THREADS, tiles == 1 ? 2 : 1)
    multirow(const char* weight, const u16* x, float* out, const float* residual, int n, int k,
             int out_stride, int num_rows, int rows_per_pass) {
  constexpr int slot = tiles * 8 * SLOT_ROW;
  constexpr int sums_size = HAS_OFFSET ? CHUNKS * GROUPS * tiles * 8 : 0;

  extern __shared__ __align__(128) char shared[];
  using WarpRing = Ring<STAGES, PIECE_BYTES>;
  u64* barriers = reinterpret_cast<u64*>(shared + WARPS * WarpRing::shared_bytes);
  Slots slots{reinterpret_cast<float*>(barriers + WARPS * STAGES + 4), barriers + WARPS * STAGES,
              barriers + WARPS * STAGES + 2};
  float* all_sums = slots.floats + 2 * WARPS * slot;  // (WARPS, sums_size)
  float* block_sums = all_sums + WARPS * sums_size;   // (OWN_SPLITS, own tiles, rows, TILE)

  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // known to be the same in all lanes
  const int blocks = CLUSTERED ? SPLITS : 1;               // that share a tile
  const int rank = blockIdx.x % blocks, worker = blockIdx.x / blocks;
  const int workers = gridDim.x / blocks;
  const int num_tiles = (n + TILE - 1) / TILE;
  const int own_tiles = (num_tiles - worker + workers - 1) / workers;

  WarpRing ring(shared + warp * WarpRing::shared_bytes, barriers + warp * STAGES, lane,
                gridDim.y == 1);
  Pieces pieces(weight, worker, workers, rank, warp, own_tiles);
  Pieces ahead = pieces;
  auto prefetch = [&] {
    if (ahead.left > 0 && lane == 0) prefetch_to_l2(ahead.next, PIECE_BYTES);
    ahead.advance();
  };
  auto fill = [&] {
    ring.fill(pieces.next, pieces.left > 0);
    pieces.advance();
    if (AHEAD > 0) prefetch();
  };
  for (int stage = 0; stage < STAGES; ++stage) {
    ring.fill(pieces.next, pieces.left > 0);
    pieces.advance();
    ahead.advance();
  }
  for (int piece = 0; piece < AHEAD; ++piece) prefetch();

  const int first_row = blockIdx.y * rows_per_pass;
  const int rows = min(rows_per_pass, num_rows - first_row);
  const int pairs = (rows + 1) / 2;  // of rows; a warp adds up one pair of rows of a tile at a time
  if (threadIdx.x == 0) {
    for (int set = 0; set < 2; ++set) {
      init_barrier(slots.full + set, WARPS);
      init_barrier(slots.empty + set, min(pairs, WARPS));
    }
  }
  __syncthreads();

  allow_next_kernel();
  wait_for_previous_kernel();

  x += size_t(first_row) * k;
  out += size_t(first_row) * out_stride;
  if (residual != nullptr) residual += size_t(first_row) * out_stride;
  float* input_sums = all_sums + warp * sums_size;
  float* own_slot = slots.floats + warp * slot + 2 * (lane & 3) * SLOT_ROW + (lane >> 2);
  int first_pair = warp;  // that this warp adds up; turns with the tiles, so that all take part

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
      float sum[tiles][4] = {};
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        const char* codes = ring.wait();
        const char* scales = codes + PIECE_CHUNKS * CHUNK_CODE_BYTES;
        multiply_piece<tiles, 0>(codes, scales, inputs, piece * PIECE_CHUNKS, input_sums, lane, sum);
        ring.release();
        fill();
      }

      finish_slice(sum);
      wait_barrier(slots.empty + slots.set, slots.parity ^ 1);
      float* to = own_slot + slots.set * WARPS * slot;
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to[(tile * 8 + (i & 1)) * SLOT_ROW + 8 * (i >> 1)] = sum[tile][i];
      __syncwarp();
      if (lane == 0) arrive(slots.full + slots.set);

      if (first_pair < pairs) {
        const int output = (worker + own * workers) * TILE + lane % TILE;
        const bool write = SPLITS == 1 && output < n;
        for (int pair = first_pair; pair < pairs; pair += WARPS) {
          const int row = pair * 2 + lane / TILE;
          const size_t at = size_t(row) * out_stride + output;
          float before = 0.0f;
          if (write && row < rows && residual != nullptr) before = residual[at];
          if (pair == first_pair) wait_barrier(slots.full + slots.set, slots.parity);
          const float* from = slots.floats + slots.set * WARPS * slot + row * SLOT_ROW + lane % TILE;
          float total = from[0];
#pragma unroll
          for (int other = 1; other < WARPS; ++other) total += from[other * slot];
          if (row >= rows) continue;
          if (SPLITS > 1)
            block_sums[((own_split * own_tiles + own) * rows + row) * TILE + lane % TILE] = total;
          else if (write)
            out[at] = residual != nullptr ? total + before : total;
        }
        __syncwarp();
        if (lane == 0) arrive(slots.empty + slots.set);
      }
      slots.advance();
      first_pair = first_pair < pairs ? first_pair + WARPS - pairs % WARPS : first_pair - pairs;
      if (first_pair >= WARPS) first_pair -= WARPS;
    }
  }

  if constexpr (SPLITS > 1) {
    __syncthreads();
    if constexpr (CLUSTERED) meet_cluster();
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
