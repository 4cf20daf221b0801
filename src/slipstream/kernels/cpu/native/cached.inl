// Products of one row with weights that caches hold, which a draft's later steps make.
#pragma once

#include "linear.inl"

namespace {

// tile_product of one row and T tiles that lie `tile_bytes` apart, for weights that caches hold:
// activations are spread to lanes once for all, and nothing is asked for ahead (from memory, several
// tiles at a time arrive a third slower than one). The same integers and sums, in the same order.
template <class K, int T>
NOINLINE void cached_product(const uint8_t* tiles, size_t tile_bytes, int groups, const Act* acts,
                             const Output& to) {
  constexpr int bytes = 256 + (K::BIAS ? 64 : 32);
  S::F sum[T];
  for (int t = 0; t < T; ++t) sum[t] = S::zero();
  for (int g = 0; g < groups; ++g, tiles += bytes, ++acts) {
    S::I dot[T];
    S::tile_dots<T>(K::ZERO == 8 ? acts->minus_8sum : 0, tiles, tile_bytes, acts->q, dot);
    const S::F factor = S::set1(acts->scale), whole = S::set1(acts->scaled_sum);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const uint16_t* scales =
          reinterpret_cast<const uint16_t*>(tiles + size_t(t) * tile_bytes + 256);
      sum[t] = S::fma(S::load_half(scales), S::mul(S::to_float(dot[t]), factor), sum[t]);
      if (K::BIAS) sum[t] = S::fma(S::load_half(scales + LANES), whole, sum[t]);
    }
  }
  for (int t = 0; t < T; ++t) store_row(sum[t], to.at(0, t * LANES), 0, LANES);
}

template <class K>
int cached_tiles(const Matrix& m, const Act* acts, int tile0, int tile1, const Output& to) {
  const int whole = m.n / LANES < tile1 ? m.n / LANES : tile1;
  const size_t bytes = m.tile_bytes();
  const auto some = [&](auto count) {
    constexpr int T = decltype(count)::value;
    for (; tile0 + T <= whole; tile0 += T)
      cached_product<K, T>(m.data + size_t(tile0) * bytes, bytes, m.k / GROUP, acts,
                           to.at(0, tile0 * LANES));
  };
  some(Rows<4>{});
  some(Rows<2>{});
  return tile0;
}

}  // namespace
