// Integer types and exact conversions; NVRTC has no CUDA headers here.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

__device__ __forceinline__ float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }

__device__ __forceinline__ float low_half(u32 pair) { return half_to_float(u16(pair)); }
__device__ __forceinline__ float high_half(u32 pair) { return half_to_float(u16(pair >> 16)); }

// The upper 16 bits of two float32, `low` in the low half: bfloat16 by truncation.
__device__ __forceinline__ u32 upper_halves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

__device__ __forceinline__ float truncate_to_bf16(float value) {
  return __uint_as_float(__float_as_uint(value) & 0xFFFF0000u);
}
