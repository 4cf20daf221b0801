// Rows of a packed matrix as float32: the embedding of token ids.
//
// Each value is scale * (code - ZERO), then + bias, each rounded once: the canonical tensor's own.

#include "async.cuh"
#include "linear_inner.cuh"

__device__ __forceinline__ float element(const char* weight, int row, int column) {
  const int chunk = column / CHUNK, at = column % CHUNK;
  const int slice = chunk / CHUNKS, of_slice = chunk % CHUNKS;
  const int piece = of_slice / PIECE_CHUNKS, within = of_slice % PIECE_CHUNKS;
  const char* from = weight + (size_t(row / TILE) * SPLITS + slice / WARPS) * SPAN_BYTES +
                     piece * LAYER_BYTES + slice % WARPS * PIECE_BYTES;
  const char* codes = from + within * CHUNK_CODE_BYTES;

  // Where packing put this column: the lane that holds it, and its place in the A operand.
  constexpr int share = RUN / 4;
  const int lane = row % 8 * 4 + at % RUN / share;
  const int step = at / RUN * (RUN / 16) + at % share / 4;
  const int high = at % 4 / 2, odd = at % 2, lower = row % TILE / 8;

  if constexpr (QUANTIZED) {
    int code;
    if constexpr (KIND == 4) {
      const u32 word = reinterpret_cast<const u32*>(codes)[lane * 4 + step];
      code = word >> (16 * odd + 8 * lower + 4 * high) & 15;
    } else if constexpr (KIND == 5 || KIND == 6) {
      const u32 word = reinterpret_cast<const u32*>(codes)[lane * 4 + step];
      const u32* upper = reinterpret_cast<const u32*>(codes + LOW_CODE_BYTES);
      const int field = step * 4 + high * 2 + lower;  // a bit each, or two
      const u32 above = KIND == 5 ? upper[lane] >> (16 * odd + field) & 1
                                  : upper[lane * 2 + step / 2] >> (16 * odd + field % 8 * 2) & 3;
      code = (word >> (16 * odd + 8 * lower + 4 * high) & 15) | above << 4;
    } else {
      const int byte = ((step / 2 * 32 + lane) * 2 + step % 2) * 8 + high * 4 + odd * 2 + lower;
      code = reinterpret_cast<const unsigned char*>(codes)[byte];
    }
    const char* scales = from + PIECE_CHUNKS * CHUNK_CODE_BYTES + within * CHUNK_SCALE_BYTES;
    float scale[2], bias[2];
    read_scales(scales, at / GROUP, row % 8, scale, bias);
    const float value = __fmul_rn(float(code - ZERO), scale[lower]);
    return HAS_BIAS ? __fadd_rn(value, bias[lower]) : value;
  } else if constexpr (KIND == 32) {
    const int at_word = ((step * 2 + high) * 32 + lane) * 4 + lower * 2 + odd;
    return reinterpret_cast<const float*>(codes)[at_word];
  } else {
    const int at_half = (step * 32 + lane) * 8 + (high * 2 + lower) * 2 + odd;
    const u16 bits = reinterpret_cast<const u16*>(codes)[at_half];
    return KIND == 17 ? half_to_float(bits) : __uint_as_float(u32(bits) << 16);
  }
}

// One block for each row of `out`, float32 of shape (rows, k), times `factor`.
extern "C" __global__ void embed(const char* weight, const int* ids, float* out, int k,
                                 float factor) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int row = ids[blockIdx.x];
  for (int column = threadIdx.x; column < k; column += blockDim.x)
    out[size_t(blockIdx.x) * k + column] = __fmul_rn(element(weight, row, column), factor);
}
