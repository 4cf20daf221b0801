// The products of a team: wgmma, weights as the A operand in registers, inputs as B in shared memory.
#pragma once

#include "linear_team_block.cuh"

// Registers that an unfinished wgmma writes stay where they are: nothing moves across this.
__device__ __forceinline__ void hold(float& value) { asm volatile("" : "+f"(value)::"memory"); }

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// sum (+)= A B^T for 8 * tiles rows and 16 columns; `inputs` describes B in shared memory.
#define SLIPSTREAM_WGMMA(n, sums, after)                                                     \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #after ", 0;\n"                    \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" sums "}, "

template <int tiles>
__device__ __forceinline__ void multiply_team(float (&sum)[tiles][4], const u32 (&a)[4], u64 inputs,
                                              int adds) {
  static_assert(tiles >= 1 && tiles <= 4, "8 to 32 rows");
#define SUM(t) "+f"(sum[t][0]), "+f"(sum[t][1]), "+f"(sum[t][2]), "+f"(sum[t][3])
#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(inputs), "r"(adds)
  if constexpr (tiles == 1) {
    SLIPSTREAM_WGMMA(8, "%0,%1,%2,%3", 9)
    "{%4,%5,%6,%7}, %8, adds, 1, 1, 0;\n}" : SUM(0) : OPERANDS);
  } else if constexpr (tiles == 2) {
    SLIPSTREAM_WGMMA(16, "%0,%1,%2,%3,%4,%5,%6,%7", 13)
    "{%8,%9,%10,%11}, %12, adds, 1, 1, 0;\n}" : SUM(0), SUM(1) : OPERANDS);
  } else if constexpr (tiles == 3) {
    SLIPSTREAM_WGMMA(24, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11", 17)
    "{%12,%13,%14,%15}, %16, adds, 1, 1, 0;\n}" : SUM(0), SUM(1), SUM(2) : OPERANDS);
  } else {
    SLIPSTREAM_WGMMA(32, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", 21)
    "{%16,%17,%18,%19}, %20, adds, 1, 1, 0;\n}"
        : SUM(0), SUM(1), SUM(2), SUM(3) : OPERANDS);
  }
#undef SUM
#undef OPERANDS
}

// Read a chunk's A operands.
__device__ __forceinline__ void load_codes(const char* codes, int lane,
                                           u32 (&a)[STEPS][TERMS][4]) {
  const ChunkCodes of(codes, lane);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) of.load(step, a[step]);
}

// Start the products of a chunk, a chain for each group; the chains advance side by side.
template <int tiles>
__device__ __forceinline__ void start_chunk(const u32 (&a)[STEPS][TERMS][4], u64 inputs,
                                            float (&products)[GROUPS][tiles][4]) {
  constexpr u64 step_size = tiles * 2 * CORE_BYTES >> 4;
  begin_products();
#pragma unroll
  for (int group_step = 0; group_step < GROUP_STEPS; ++group_step)
#pragma unroll
    for (int term = 0; term < TERMS; ++term)
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        const int step = group * GROUP_STEPS + group_step;
        multiply_team<tiles>(products[group], a[step][term], inputs + step * step_size,
                             group_step != 0 || term != 0);
      }
  commit_products();
}

template <int tiles>
__device__ __forceinline__ void hold_all(float (&products)[GROUPS][tiles][4]) {
#pragma unroll
  for (int group = 0; group < GROUPS; ++group)
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) hold(products[group][tile][i]);
}

// Multiply a piece of a slice and add its products to `sum`. `inputs` describes the B operand of its
// first step, `input_sums` points at the sums of its first group.
template <int tiles>
__device__ __forceinline__ void multiply_piece(const char* codes, u64 inputs,
                                               const float* input_sums, int lane,
                                               float (&sum)[tiles][4]) {
  constexpr int chunk_inputs = STEPS * tiles * 2 * CORE_BYTES >> 4;
  // What comes next is read while the tensor cores are at work, where registers suffice.
  constexpr bool codes_early = TERMS == 1, scales_early = GROUPS * tiles <= 4;
  const char* scales = codes + PIECE_CHUNKS * CHUNK_CODE_BYTES;
  u32 a[codes_early ? 2 : 1][STEPS][TERMS][4];
  load_codes(codes, lane, a[0]);
#pragma unroll
  for (int i = 0; i < PIECE_CHUNKS; ++i) {
    const bool more = i + 1 < PIECE_CHUNKS;
    const char* next_codes = codes + (i + 1) * CHUNK_CODE_BYTES;
    const char* chunk_scales = scales + i * CHUNK_SCALE_BYTES;
    const float* chunk_sums = input_sums + i * (GROUPS * tiles * 8);
    float products[GROUPS][tiles][4];
    ChunkScales<tiles> scale;
    start_chunk<tiles>(a[codes_early ? i % 2 : 0], inputs + i * chunk_inputs, products);
    if (codes_early && more) load_codes(next_codes, lane, a[codes_early ? (i + 1) % 2 : 0]);
    if (scales_early) scale.load(chunk_scales, chunk_sums, lane);
    wait_products();
    hold_all<tiles>(products);
    if (!scales_early) scale.load(chunk_scales, chunk_sums, lane);
    scale.add(products, sum);
    if (!codes_early && more) load_codes(next_codes, lane, a[0]);
  }
}
