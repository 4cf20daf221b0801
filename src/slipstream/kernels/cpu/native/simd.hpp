// Sixteen-lane vectors, twice: AVX-512 and plain C++ that any compiler turns into what it has.
// Kernels are templates over one of the two, so both paths perform the same operations in the same
// order; only the fused multiply-add differs (the portable path rounds twice).
//
// Everything sits in an unnamed namespace: each translation unit keeps its own copy, compiled for
// its own instruction set, and the linker never shares one across.
#pragma once

#include <cstdint>
#include <cstring>

// One copy of each big template, called: a compiler left free copies them into every caller.
#if defined(_MSC_VER)
#define NOINLINE __declspec(noinline)
#else
#define NOINLINE __attribute__((noinline))
#endif

// Inside those, everything: left free, a compiler calls what is used often, and passes registers
// through memory.
#if defined(_MSC_VER)
#define INLINE __forceinline
#else
#define INLINE inline __attribute__((always_inline))
#endif

#include "half.hpp"

#if defined(__AVX512VNNI__)
#include "simd_avx512.hpp"
#else
#include "simd_portable.hpp"
#endif

namespace {

// exp(x) = 2**n * (1 + r * p) for x in [-87.3, 88], clamped to it: range reduction by ln 2 in two parts
// and a degree-6 Taylor polynomial on [-ln2/2, ln2/2], relative error about 2e-7 (Cody and Waite 1980).
struct ExpParts {
  Simd::F n, r, p;
};

inline ExpParts exp_parts(const Simd::F& x) {
  using S = Simd;
  const S::F clamped = S::min(S::max(x, S::set1(-87.3f)), S::set1(88.0f));
  const S::F n = S::rint(S::mul(clamped, S::set1(1.44269504f)));
  S::F r = S::fma(n, S::set1(-0.693359375f), clamped);
  r = S::fma(n, S::set1(2.12194440e-4f), r);
  S::F p = S::set1(1.0f / 720);
  p = S::fma(p, r, S::set1(1.0f / 120));
  p = S::fma(p, r, S::set1(1.0f / 24));
  p = S::fma(p, r, S::set1(1.0f / 6));
  p = S::fma(p, r, S::set1(0.5f));
  p = S::fma(p, r, S::set1(1.0f));
  return {n, r, p};
}

// exp(x) for x <= 88, 0 below -87.3.
inline Simd::F exp_lanes(const Simd::F& x) {
  const ExpParts e = exp_parts(x);
  return Simd::scale2(Simd::fma(e.p, e.r, Simd::set1(1.0f)), e.n);
}

// tanh(x) = t / (t + 2), t = exp(2 x) - 1 taken as (2**n - 1) + 2**n r p, so that small x keep their
// relative precision.
inline Simd::F tanh_lanes(const Simd::F& x) {
  using S = Simd;
  const S::F one = S::set1(1.0f);
  const ExpParts e = exp_parts(S::add(x, x));
  const S::F power = S::scale2(one, e.n);
  const S::F t = S::fma(S::mul(e.p, e.r), power, S::sub(power, one));
  return S::div(t, S::add(t, S::set1(2.0f)));
}

// cap * tanh(x / cap), as x * (1 / cap).
inline Simd::F capped(const Simd::F& x, float cap) {
  return Simd::mul(Simd::set1(cap), tanh_lanes(Simd::mul(x, Simd::set1(1.0f / cap))));
}

}  // namespace
