// The inner product that all linear kernels share: instruction, order along K, rounding.
//
// mma.m16n8k16: weights are the A operand (16 outputs), inputs the B operand (8 rows), float32
// accumulators. A group's products are one chain of mma; scale, then offset, are applied once a group
// by fused multiply-add. Dense weights have one chain a chunk; float16 and float32 are split exactly
// into two and three bfloat16 terms, the smallest first.
//
// Codes need no conversion: the bits of a small integer c, read as bfloat16, are c * 2^-133, since
// subnormal numbers and the first normal ones are evenly spaced. A mask alone picks a code out of its
// word; one that stays in the upper half of a byte counts 16 times, so its inputs are divided by 16.
// Codes of 5 and 6 bits are put together of a nibble and what is above it.
// Inputs are multiplied by 2^96 to keep products normal: that is exact below 2^31, and sums are
// multiplied by 2^37 once a slice.
#pragma once

#include "linear_layout.cuh"

constexpr int TERMS = KIND == 32 ? 3 : KIND == 17 ? 2 : 1;

__device__ __forceinline__ void mma(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

constexpr u32 INPUT_SCALE = 0x6F806F80u;       // 2^96, twice, as bfloat16
constexpr u32 HIGH_INPUT_SCALE = 0x6D806D80u;  // 2^92
constexpr float SUM_SCALE = 137438953472.0f;   // 2^37

__device__ __forceinline__ u32 multiply_bf16(u32 a, u32 b) {
  u32 product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

// Scale the B operand of a step, columns 2 t and 2 t + 1, then 2 t + 8 and 2 t + 9, for the codes.
__device__ __forceinline__ void scale_inputs(u32& low, u32& high) {
  if constexpr (QUANTIZED) {
    low = multiply_bf16(low, INPUT_SCALE);
    high = multiply_bf16(high, KIND == 4 ? HIGH_INPUT_SCALE : INPUT_SCALE);
  }
}

// Split two float32 into TERMS bfloat16 pairs for register `i` of A, smallest term first.
__device__ __forceinline__ void split_terms(float low, float high, int i, u32 (&a)[TERMS][4]) {
#pragma unroll
  for (int term = TERMS - 1; term >= 0; --term) {
    a[term][i] = upper_halves(low, high);
    low -= truncate_to_bf16(low);
    high -= truncate_to_bf16(high);
  }
}

// The A operand of one step, from a chunk's codes in shared memory.
struct ChunkCodes {
  const uint4* lane_codes;
  const char* above;  // this lane's bits above the nibbles

  __device__ __forceinline__ ChunkCodes(const char* codes, int lane)
      : lane_codes(reinterpret_cast<const uint4*>(codes) + lane),
        above(codes + LOW_CODE_BYTES + lane * (KIND == 6 ? 8 : 4)) {}

  __device__ __forceinline__ u32 high_word(int step) const {
    if constexpr (KIND == 5) return *reinterpret_cast<const u32*>(above);
    const uint2 words = *reinterpret_cast<const uint2*>(above);
    return step < 2 ? words.x : words.y;
  }

  __device__ __forceinline__ void load(int step, u32 (&a)[TERMS][4]) const {
    if constexpr (KIND == 4) {
      const uint4 words = lane_codes[0];
      const u32 word = step == 0 ? words.x : step == 1 ? words.y : step == 2 ? words.z : words.w;
      const u32 upper = word >> 8;
      a[0][0] = word & 0x000F000Fu;
      a[0][1] = upper & 0x000F000Fu;
      a[0][2] = word & 0x00F000F0u;
      a[0][3] = upper & 0x00F000F0u;
    } else if constexpr (KIND == 5 || KIND == 6) {
      const uint4 words = lane_codes[0];
      const u32 word = step == 0 ? words.x : step == 1 ? words.y : step == 2 ? words.z : words.w;
      const u32 upper = high_word(step);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Register i has the nibbles 2 (i % 2) + i / 2 and 4 more, and field `field` of each half.
        constexpr u32 mask = KIND == 6 ? 0x00300030u : 0x00100010u;
        const int field = KIND == 6 ? 2 * (step % 2 * 4 + i) : step * 4 + i;
        const u32 above = field < 4 ? upper << (4 - field) : upper >> (field - 4);
        a[0][i] = word >> (i % 2 * 8 + i / 2 * 4) & 0x000F000Fu | above & mask;
      }
    } else if constexpr (KIND == 8) {
      const uint4 words = lane_codes[step / 2 * 32];
      const u32 pair[2] = {step % 2 ? words.z : words.x, step % 2 ? words.w : words.y};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[0][i] = __byte_perm(pair[i / 2], 0, i % 2 ? 0x4341 : 0x4240);
    } else if constexpr (KIND == 16) {
      const uint4 words = lane_codes[step * 32];
      a[0][0] = words.x, a[0][1] = words.y, a[0][2] = words.z, a[0][3] = words.w;
    } else if constexpr (KIND == 17) {
      const uint4 words = lane_codes[step * 32];
      const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) split_terms(low_half(pairs[i]), high_half(pairs[i]), i, a);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 words = lane_codes[(step * 2 + half) * 32];
        split_terms(__uint_as_float(words.x), __uint_as_float(words.y), 2 * half, a);
        split_terms(__uint_as_float(words.z), __uint_as_float(words.w), 2 * half + 1, a);
      }
    }
  }
};

__device__ __forceinline__ float low_number(u32 pair) {
  return SCALE == 16 ? bf16_to_float(u16(pair)) : low_half(pair);
}
__device__ __forceinline__ float high_number(u32 pair) {
  return SCALE == 16 ? bf16_to_float(u16(pair >> 16)) : high_half(pair);
}

// Scale and bias of one group for output rows g and g + 8 of the tile, from a chunk's scales. Products of
// two levels are exact.
__device__ __forceinline__ void read_scales(const char* scales, int group, int g, float (&scale)[2],
                                            float (&bias)[2]) {
  if constexpr (TWO_LEVELS && HAS_BIAS) {
    const uint2 pairs = reinterpret_cast<const uint2*>(scales)[g];
    const char* small = scales + SUPER_BYTES;
    const u32 codes = reinterpret_cast<const u16*>(small)[group * 8 + g] |
                      u32(reinterpret_cast<const unsigned char*>(small)[GROUPS * 16 + group * 8 + g])
                          << 16;
    scale[0] = low_half(pairs.x) * float(codes & 63);
    bias[0] = high_half(pairs.x) * float(codes >> 6 & 63);
    scale[1] = low_half(pairs.y) * float(codes >> 12 & 63);
    bias[1] = high_half(pairs.y) * float(codes >> 18 & 63);
  } else if constexpr (TWO_LEVELS) {
    const u32 pair = reinterpret_cast<const u32*>(scales)[g];
    const signed char* small =
        reinterpret_cast<const signed char*>(scales + SUPER_BYTES) + (group * 8 + g) * 2;
    scale[0] = low_half(pair) * float(small[0]);
    scale[1] = high_half(pair) * float(small[1]);
  } else if constexpr (HAS_BIAS) {
    const uint2 pairs = reinterpret_cast<const uint2*>(scales + group * GROUP_SCALE_BYTES)[g];
    scale[0] = low_number(pairs.x), bias[0] = high_number(pairs.x);
    scale[1] = low_number(pairs.y), bias[1] = high_number(pairs.y);
  } else {
    const u32 pair = reinterpret_cast<const u32*>(scales + group * GROUP_SCALE_BYTES)[g];
    scale[0] = low_number(pair), scale[1] = high_number(pair);
  }
}

// Scale and offset of one group for output rows g and g + 8 of the tile.
struct GroupScale {
  float scale[2];
  float offset[2];

  GroupScale() = default;
  __device__ __forceinline__ GroupScale(const char* scales, int group, int lane) {
    float bias[2] = {};
    read_scales(scales, group, lane >> 2, scale, bias);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      offset[i] = HAS_BIAS ? fmaf(-ZERO, scale[i], bias[i]) : -ZERO * scale[i];
  }
};

// What a chunk's products are scaled with, and the sums of inputs that its offsets are multiplied by.
template <int tiles>
struct ChunkScales {
  static constexpr int groups = QUANTIZED ? GROUPS : 0;

  GroupScale of[GROUPS];
  float2 inputs[GROUPS][tiles];

  __device__ __forceinline__ void load(const char* scales, const float* input_sums, int lane) {
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      of[group] = GroupScale(scales, group, lane);
      if constexpr (HAS_OFFSET)
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile)
          inputs[group][tile] = *reinterpret_cast<const float2*>(
              input_sums + (group * tiles + tile) * 8 + 2 * (lane & 3));
    }
  }

  // Add products to `sum`: scale, then offset, by groups.
  __device__ __forceinline__ void add(const float (&products)[GROUPS][tiles][4],
                                      float (&sum)[tiles][4]) const {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group)
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sum[tile][i] = QUANTIZED ? fmaf(of[group].scale[i >> 1], products[group][tile][i],
                                          sum[tile][i])
                                   : sum[tile][i] + products[group][tile][i];
        if constexpr (HAS_OFFSET)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sum[tile][i] = fmaf(of[group].offset[i >> 1],
                                i & 1 ? inputs[group][tile].y : inputs[group][tile].x,
                                sum[tile][i]);
      }
  }
};

// Add the products of a chunk to `sum`, for `tiles` tiles of 8 rows.
//
// `columns.load(tile, step, b)` gives the B operand of a step; `input_sums` points at the sums of
// inputs of the groups, float32 of shape (GROUPS, tiles, 8) in shared memory. The groups' chains of
// mma are independent and advance side by side.
template <int tiles, class Columns>
__device__ __forceinline__ void multiply_chunk(const char* codes, const char* scales,
                                               const Columns& columns, const float* input_sums,
                                               int lane, float (&sum)[tiles][4]) {
  const ChunkCodes chunk(codes, lane);
  float products[GROUPS][tiles][4] = {};
#pragma unroll
  for (int group_step = 0; group_step < GROUP_STEPS; ++group_step) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const int step = group * GROUP_STEPS + group_step;
      u32 a[TERMS][4];
      chunk.load(step, a);
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        u32 b[2];
        columns.load(tile, step, b);
#pragma unroll
        for (int term = 0; term < TERMS; ++term) mma(products[group][tile], a[term], b);
      }
    }
  }
  ChunkScales<tiles> scale;
  scale.load(scales, input_sums, lane);
  scale.add(products, sum);
}

// Scale the sums of a finished slice.
template <int tiles>
__device__ __forceinline__ void finish_slice(float (&sum)[tiles][4]) {
  if constexpr (QUANTIZED) {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[tile][i] *= SUM_SCALE;
  }
}

// Write the sums of a chunk's inputs for one tile of 8 rows, as `multiply_chunk` reads them.
template <int tiles, class Columns>
__device__ __forceinline__ void sum_inputs(const Columns& columns, int tile, float* input_sums,
                                           int lane) {
  constexpr u32 high = KIND == 4 ? 0x00100010u : 0x00010001u;
  const u32 ones[4] = {0x00010001u, 0x00010001u, high, high};  // code 1 everywhere
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int step = group * GROUP_STEPS; step < (group + 1) * GROUP_STEPS; ++step) {
      u32 b[2];
      columns.load(tile, step, b);
      mma(total, ones, b);
    }
    if (lane < 4)
      *reinterpret_cast<float2*>(input_sums + (group * tiles + tile) * 8 + 2 * lane) =
          make_float2(total[0], total[1]);
  }
}
