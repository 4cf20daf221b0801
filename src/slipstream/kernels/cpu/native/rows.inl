// What all products share: how many rows a template takes, and where their sums go.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace {

using S = Simd;

inline int rows_in_block(int rows, int block, int share) {
  const int left = rows - block * share;
  return left < share ? left : share;
}

template <int N>
struct Rows {
  static constexpr int value = N;
};

// The last tile's rows, where it has fewer than sixteen.
NOINLINE void store_lanes(const S::F& sum, const float* bias, const float* residual, int live,
                          float* out) {
  float lanes[LANES];
  S::store(lanes, sum);
  for (int i = 0; i < live; ++i) {
    const float value = bias ? lanes[i] + bias[i] : lanes[i];
    out[i] = residual ? value + residual[i] : value;
  }
}

INLINE void store_row(S::F sum, const Output& to, int row, int live) {
  float* const out = to.out + size_t(row) * size_t(to.ldo);
  const float* const residual =
      to.residual ? to.residual + size_t(row) * size_t(to.ldr) : nullptr;
  if (live == LANES) {
    if (to.bias) sum = S::add(sum, S::load(to.bias));
    S::store(out, residual ? S::add(sum, S::load(residual)) : sum);
    return;
  }
  store_lanes(sum, to.bias, residual, live, out);
}

inline int live_lanes(const Matrix& m, int tile) {
  const int left = m.n - tile * LANES;
  return left < LANES ? left : LANES;
}

}  // namespace
