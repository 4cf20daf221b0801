// What the kernels of a step share: number formats without headers, warp reductions in a fixed
// order, and the two halves of programmatic dependent launch.
#pragma once

typedef unsigned short half_bits;      // fp16
typedef unsigned short bfloat16_bits;  // bfloat16

__device__ __forceinline__ half_bits to_half(float x) {
    half_bits out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ float from_half(half_bits x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
    return out;
}

// Two floats to two fp16, `low` in the lower half of the word.
__device__ __forceinline__ unsigned pack_half(float low, float high) {
    unsigned out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ unsigned pack_bfloat16(float low, float high) {
    unsigned out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ bfloat16_bits to_bfloat16(float x) {
    return (bfloat16_bits)pack_bfloat16(x, 0.0f);
}

// 2**x; 2**0 is 1 exactly and 2**-inf is 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// The sum over a warp, the same in every lane, added up in one order.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Wait for what the kernels before wrote. Every kernel of a step calls it before its first read of
// such memory, so that each launch waits for all that came before, however early it was started.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel of the step take free multiprocessors; it waits for this one's results. Only
// where the next kernel has much to do before it waits: a product that starts early fetches weights,
// and the few loads of a norm or of attention would queue behind them (measured, 3.1 against 3.6 ms
// a step of 12B shape).
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
