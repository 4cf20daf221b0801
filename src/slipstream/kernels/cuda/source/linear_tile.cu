// y = x W^T for many rows: weights are read once for a tile of 16, 32, 64 or 128 rows.
//
// A block makes 64 outputs for a tile of rows. It walks K chunk by chunk: codes, scales and inputs of
// the coming chunks are copied to shared memory while this one is multiplied. Each warp multiplies 16
// outputs by up to 32 rows and keeps the sum of the slice at hand and of the slices before it, so
// that it adds what `multirow` adds, in the same order. Blocks of a cluster own consecutive spans of
// K. SIDE is 1.

#include "async.cuh"
#include "linear_inner.cuh"

constexpr int OUTPUT_WARPS = 4;
constexpr int WARP_ROWS = 32;  // at most: more leave too few registers for enough warps
constexpr int OUTPUTS = OUTPUT_WARPS * TILE;
constexpr int CODE_BYTES = OUTPUT_WARPS * (CHUNK_CODE_BYTES + CHUNK_SCALE_BYTES);  // of a stage

// A lane's inputs of a chunk and one tile.
struct ScaledInputs {
  u32 words[CHUNK / RUN][RUN / 16][2];

  __device__ __forceinline__ void load(int, int step, u32 (&b)[2]) const {
    b[0] = words[step * 16 / RUN][step % (RUN / 16)][0];
    b[1] = words[step * 16 / RUN][step % (RUN / 16)][1];
  }
};

// Inputs of a chunk in shared memory: bfloat16 of shape (CHUNK / RUN, all_rows, RUN).
template <int all_rows>
struct SharedInputs {
  char* inputs;
  int first_row, lane;

  // Scale this lane's inputs of one tile in place and return them.
  __device__ __forceinline__ ScaledInputs scale(int tile) const {
    const int row = first_row + tile * 8 + (lane >> 2);
    ScaledInputs scaled;
#pragma unroll
    for (int run = 0; run < CHUNK / RUN; ++run) {
      char* at = inputs + ((run * all_rows + row) * 4 + (lane & 3)) * (RUN / 2);
      u32(&words)[RUN / 16][2] = scaled.words[run];
      if constexpr (RUN == 32) {
        uint4 values = *reinterpret_cast<uint4*>(at);
        scale_inputs(values.x, values.y);
        scale_inputs(values.z, values.w);
        *reinterpret_cast<uint4*>(at) = values;
        words[0][0] = values.x, words[0][1] = values.y;
        words[RUN / 16 - 1][0] = values.z, words[RUN / 16 - 1][1] = values.w;
      } else {
        uint2 values = *reinterpret_cast<uint2*>(at);
        scale_inputs(values.x, values.y);
        *reinterpret_cast<uint2*>(at) = values;
        words[0][0] = values.x, words[0][1] = values.y;
      }
    }
    return scaled;
  }

  __device__ __forceinline__ void load(int tile, int step, u32 (&b)[2]) const {
    const int row = first_row + tile * 8 + (lane >> 2);
    if constexpr (RUN == 32) {
      const uint4 values = *reinterpret_cast<const uint4*>(
          inputs + ((step / 2 * all_rows + row) * 4 + (lane & 3)) * 16);
      b[0] = step % 2 ? values.z : values.x;
      b[1] = step % 2 ? values.w : values.y;
    } else {
      const uint2 values = *reinterpret_cast<const uint2*>(
          inputs + ((step * all_rows + row) * 4 + (lane & 3)) * 8);
      b[0] = values.x;
      b[1] = values.y;
    }
  }
};

template <int all_rows>
__global__ void __launch_bounds__(OUTPUT_WARPS * 32 * (all_rows > WARP_ROWS ? all_rows / WARP_ROWS : 1))
    tile(const char* weight, const u16* x, float* out, const float* residual, int n, int k,
         int out_stride, int residual_stride, int num_rows) {
  constexpr int tiles = (all_rows > WARP_ROWS ? WARP_ROWS : all_rows) / 8;  // of one warp
  constexpr int row_tiles = all_rows / 8;
  constexpr int warps = OUTPUT_WARPS * (row_tiles / tiles);
  constexpr int threads = warps * 32;
  constexpr int input_bytes = all_rows * CHUNK * 2;
  constexpr int stage_bytes = CODE_BYTES + input_bytes;
  constexpr int sums_size = HAS_OFFSET ? GROUPS * all_rows : 0;  // (warp's rows, GROUPS, tiles, 8)
  // Sums of (all_rows, OUTPUTS) of each span that the cluster adds.
  constexpr int block_sums_size = all_rows * OUTPUTS;
  constexpr int total_chunks = OWN_TURNS * WARPS * CHUNKS;

  extern __shared__ __align__(128) char shared[];
  float* input_sums = reinterpret_cast<float*>(shared + TILE_STAGES * stage_bytes);  // two chunks'
  float* block_sums = input_sums + 2 * sums_size;  // where CLUSTERED, see block_sums_size

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int output_warp = warp % OUTPUT_WARPS, row_warp = warp / OUTPUT_WARPS;
  const int rank = blockIdx.x % BLOCKS;
  const int first_tile = blockIdx.x / BLOCKS * OUTPUT_WARPS;
  const int num_tiles = (n + TILE - 1) / TILE;
  const int first_row = blockIdx.y * all_rows;
  const int rows = min(all_rows, num_rows - first_row);
  x += size_t(first_row) * k;
  out += size_t(first_row) * out_stride;
  if (residual != nullptr) residual += size_t(first_row) * residual_stride;

  // Each thread copies one vector of the inputs of a few rows, each warp the codes of its outputs.
  constexpr int parts = CHUNK / 8, rows_at_once = threads / parts;
  const int part = threadIdx.x % parts, part_row = threadIdx.x / parts;
  int column = rank * total_chunks * CHUNK;
  const u16* inputs_from = x + size_t(part_row) * k + column + part * 8;
  char* inputs_to = shared + CODE_BYTES +
                    ((part / (RUN / 8) * all_rows + part_row) * (RUN / 8) + part % (RUN / 8)) * 16;
  const bool copies_codes = row_warp == 0 && first_tile + output_warp < num_tiles;
  const char* piece_from =
      weight + (size_t(first_tile + output_warp) * SPLITS + rank * OWN_TURNS) * SPAN_BYTES;
  char* codes_to = shared + output_warp * (CHUNK_CODE_BYTES + CHUNK_SCALE_BYTES);
  int within = 0, piece = 0, piece_slice = 0, filling = 0, num_copied = 0;
  auto copy_chunk = [&] {
    if (num_copied < total_chunks) {
      const int stage = filling * stage_bytes;
      if (copies_codes) {
        const char* codes = piece_from + within * CHUNK_CODE_BYTES;
        const char* scales =
            piece_from + PIECE_CHUNKS * CHUNK_CODE_BYTES + within * CHUNK_SCALE_BYTES;
#pragma unroll
        for (int at = 0; at < CHUNK_CODE_BYTES; at += 512)
          if (CHUNK_CODE_BYTES % 512 == 0 || at + lane * 16 < CHUNK_CODE_BYTES)
            copy_16(codes_to + stage + at + lane * 16, codes + at + lane * 16);
        if (lane * 16 < CHUNK_SCALE_BYTES)
          copy_16(codes_to + stage + CHUNK_CODE_BYTES + lane * 16, scales + lane * 16);
      }
#pragma unroll
      for (int row = 0; row < all_rows; row += rows_at_once) {
        const bool valid = part_row + row < rows && column + part * 8 < k;
        copy_16(inputs_to + stage + row * RUN * 2, valid ? inputs_from + size_t(row) * k : x, valid);
      }
      inputs_from += CHUNK;
      column += CHUNK;
      if (++within == PIECE_CHUNKS) {
        within = 0;
        if (++piece < PIECES) {
          piece_from += LAYER_BYTES;
        } else {
          piece = 0;
          if (++piece_slice == WARPS) piece_slice = 0;
          // The next slice's first piece; behind the last slice follows the next span.
          piece_from += PIECE_BYTES - (piece_slice == 0 ? 0 : (PIECES - 1) * LAYER_BYTES);
        }
      }
      filling = filling + 1 == TILE_STAGES ? 0 : filling + 1;
      ++num_copied;
    }
    commit_copies();
  };

  // Scale a chunk's inputs where they lie and sum them, each warp its share of the rows.
  auto prepare_inputs = [&](int index, int stage) {
    if constexpr (QUANTIZED) {
      for (int row_tile = warp; row_tile < row_tiles; row_tile += warps) {
        const SharedInputs<all_rows> columns{shared + stage * stage_bytes + CODE_BYTES,
                                             row_tile / tiles * tiles * 8, lane};
        const ScaledInputs scaled = columns.scale(row_tile % tiles);
        if constexpr (HAS_OFFSET) {
          float* to = input_sums + index % 2 * sums_size + row_tile / tiles * GROUPS * tiles * 8;
          sum_inputs<tiles>(scaled, row_tile % tiles, to, lane);
        }
      }
    }
  };

  allow_next_kernel();
  wait_for_previous_kernel();
  for (int stage = 0; stage < TILE_STAGES - 1; ++stage) copy_chunk();
  wait_copies<TILE_STAGES - 2>();
  __syncthreads();
  prepare_inputs(0, 0);

  float sum[tiles][4] = {}, total[tiles][4] = {}, spans[tiles][4] = {};
  int stage = 0, chunk = 0, slice = 0;
  for (int index = 0; index < total_chunks; ++index) {
    wait_copies<TILE_STAGES - 3>();
    __syncthreads();
    copy_chunk();
    const int next_stage = stage + 1 == TILE_STAGES ? 0 : stage + 1;
    if (index + 1 < total_chunks) prepare_inputs(index + 1, next_stage);

    const char* codes = shared + stage * stage_bytes +
                        output_warp * (CHUNK_CODE_BYTES + CHUNK_SCALE_BYTES);
    const SharedInputs<all_rows> columns{shared + stage * stage_bytes + CODE_BYTES,
                                         row_warp * tiles * 8, lane};
    multiply_chunk<tiles>(codes, codes + CHUNK_CODE_BYTES, columns,
                          input_sums + index % 2 * sums_size + row_warp * GROUPS * tiles * 8, lane,
                          sum);

    if (++chunk == CHUNKS) {
      finish_slice(sum);
      const bool first = slice % WARPS == 0, last = slice % WARPS == WARPS - 1;
#pragma unroll
      for (int t = 0; t < tiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[t][i] = first ? sum[t][i] : total[t][i] + sum[t][i];
          sum[t][i] = 0.0f;
          if constexpr (CLUSTERED) {
            const int row = (row_warp * tiles + t) * 8 + 2 * (lane & 3) + (i & 1);
            float* to = block_sums + slice / WARPS * block_sums_size + row * OUTPUTS +
                        output_warp * TILE + (lane >> 2) + 8 * (i >> 1);
            if (last) *to = total[t][i];
          } else if constexpr (SPLITS > 1) {
            if (last) spans[t][i] = slice < WARPS ? total[t][i] : spans[t][i] + total[t][i];
          }
        }
      chunk = 0;
      ++slice;
    }
    stage = next_stage;
  }

  if constexpr (CLUSTERED) {
    meet_cluster();
    for (int at = threadIdx.x + rank * threads; at < rows * OUTPUTS; at += threads * BLOCKS) {
      const int output = first_tile * TILE + at % OUTPUTS;
      if (output >= n) continue;
      float sums = read_cluster(block_sums + at, 0);
#pragma unroll
      for (int split = 1; split < SPLITS; ++split)
        sums += read_cluster(block_sums + split % OWN_TURNS * block_sums_size + at,
                             split / OWN_TURNS);
      const int row = at / OUTPUTS;
      if (residual != nullptr) sums += residual[size_t(row) * residual_stride + output];
      out[size_t(row) * out_stride + output] = sums;
    }
    meet_cluster();
  } else {
#pragma unroll
    for (int t = 0; t < tiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = (row_warp * tiles + t) * 8 + 2 * (lane & 3) + (i & 1);
        const int output = (first_tile + output_warp) * TILE + (lane >> 2) + 8 * (i >> 1);
        if (row >= rows || output >= n) continue;
        float sums = SPLITS > 1 ? spans[t][i] : total[t][i];
        if (residual != nullptr) sums += residual[size_t(row) * residual_stride + output];
        out[size_t(row) * out_stride + output] = sums;
      }
  }
}
