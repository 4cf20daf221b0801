// Matrix products of the CPU back end, written once over Simd.
//
// A vector's sixteen lanes are sixteen output rows, so nothing is ever summed across lanes.
// Quantized weights meet activations rounded to int8 a group of 32 at a time; the integer dot
// product of a group is exact, and groups are added in order in float32.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace {

using S = Simd;

inline int rows_in_block(int rows, int block, int share) {
  const int left = rows - block * share;
  return left < share ? left : share;
}

// Round one row's groups [group0, group1) to int8; `x` is the row's column 0.
void quantize(const float* x, int row, int rows, int share, int groups, int group0, int group1,
              Act* acts) {
  const int block = row / share, stride = rows_in_block(rows, block, share);
  Act* out = acts + size_t(block) * share * groups + row % share;
  for (int g = group0; g < group1; ++g) {
    const S::F a = S::load(x + g * GROUP), b = S::load(x + g * GROUP + LANES);
    const float amax = S::largest(S::max(S::abs(a), S::abs(b)));
    const float inverse = amax > 0 ? 127.0f / amax : 0.0f;
    const S::F qa = S::rint(S::mul(a, S::set1(inverse)));
    const S::F qb = S::rint(S::mul(b, S::set1(inverse)));
    const float sum = S::sum(S::add(qa, qb));  // whole numbers: exact
    Act& act = out[size_t(g) * stride];
    S::store_int8(act.q, qa);
    S::store_int8(act.q + LANES, qb);
    act.scale = amax / 127.0f;
    act.scaled_sum = act.scale * sum;
    act.minus_8sum = -8 * int32_t(sum);
    act.minus_128sum = -128 * int32_t(sum);
  }
}

template <int N>
struct Rows {
  static constexpr int value = N;
};

inline void store_row(S::F sum, const Output& to, int row, int live) {
  float* const out = to.out + size_t(row) * size_t(to.ldo);
  const float* const residual =
      to.residual ? to.residual + size_t(row) * size_t(to.ldr) : nullptr;
  if (live == LANES) {
    if (to.bias) sum = S::add(sum, S::load(to.bias));
    S::store(out, residual ? S::add(sum, S::load(residual)) : sum);
    return;
  }
  float lanes[LANES];
  S::store(lanes, sum);
  for (int i = 0; i < live; ++i) {
    const float value = to.bias ? lanes[i] + to.bias[i] : lanes[i];
    out[i] = residual ? value + residual[i] : value;
  }
}

template <Format F>
inline void unpack(const uint8_t* p, S::B (&w)[8]) {
  if (F == Format::q4) {
    for (int i = 0; i < 4; ++i) {
      const S::B both = S::load_bytes(p + 64 * i);
      w[i] = S::low_nibbles(both);
      w[i + 4] = S::high_nibbles(both);
    }
  } else {
    for (int i = 0; i < 8; ++i) w[i] = S::load_bytes(p + 64 * i);
  }
}

// Add one group's product to the sums of P rows.
template <Format F, bool BIAS, int ZERO, int P>
inline void add_group(const S::B (&w)[8], S::F scale, S::F bias, const Act* acts, S::F* sum) {
  int32_t start[P];
  const int8_t* x[P];
  S::I dot[P];
#pragma GCC unroll 4
  for (int j = 0; j < P; ++j) {
    start[j] = ZERO == 8 ? acts[j].minus_8sum : ZERO == 128 ? acts[j].minus_128sum : 0;
    x[j] = acts[j].q;
  }
  S::dots<P, F == Format::q4 ? 15 : 255>(start, w, x, dot);
#pragma GCC unroll 4
  for (int j = 0; j < P; ++j) {
    sum[j] = S::fma(scale, S::mul(S::to_float(dot[j]), S::set1(acts[j].scale)), sum[j]);
    if (BIAS) sum[j] = S::fma(bias, S::set1(acts[j].scaled_sum), sum[j]);
  }
}

// The one inner product of quantized weights: R rows share the weights of one tile. Integer dot
// products are exact, so only the order of groups matters, and it is the same for every R.
// `stride` is the number of rows in the activation block, R of which start at `acts`.
template <Format F, bool BIAS, int ZERO, int R>
NOINLINE void tile_product(const uint8_t* w_data, int groups, const Act* acts, int stride,
                           const Output& to, int live, const uint8_t* fetch, int fetch_lines) {
  constexpr int codes = F == Format::q4 ? 256 : 512;
  constexpr int bytes = codes + (BIAS ? 64 : 32);
  constexpr int FOURS = R / 4 * 4;
  // Measured best of 0 to 16 KiB: memory delivers about that while it answers once. More rows take
  // longer over a byte and keep more activations in the first cache.
  constexpr int ahead = R <= 2 ? 8192 : 4096;
  S::F sum[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sum[r] = S::zero();
  for (int g = 0; g < groups; ++g, w_data += bytes, acts += stride) {
    for (int i = 0; i < bytes; i += 64) S::prefetch(w_data + ahead + i);
    if constexpr (R > 2)  // fewer rows are as fast as their weights arrive, and nothing is asked for
      for (int i = 0; i < fetch_lines; ++i, fetch += 64) S::prefetch(fetch);
    S::B w[8];
    unpack<F>(w_data, w);
    const S::F scale = S::load_half(reinterpret_cast<const uint16_t*>(w_data + codes));
    S::F bias = S::zero();
    if (BIAS) bias = S::load_half(reinterpret_cast<const uint16_t*>(w_data + codes + 32));
#pragma GCC unroll 4
    for (int r = 0; r < FOURS; r += 4)
      add_group<F, BIAS, ZERO, 4>(w, scale, bias, acts + r, sum + r);
    if constexpr (R > FOURS)
      add_group<F, BIAS, ZERO, R - FOURS>(w, scale, bias, acts + FOURS, sum + FOURS);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store_row(sum[r], to, r, live);
}

// tile_product for any number of rows up to MAX_SHARE, in as few reads as registers allow.
template <Format F, bool BIAS, int ZERO, int R = S::max_rows>
NOINLINE void block_product(const uint8_t* w, int groups, const Act* acts, int rows,
                            const Output& to, int live, const uint8_t* fetch, int fetch_lines) {
  int r = 0;
  const auto call = [&](auto width) {
    constexpr int N = decltype(width)::value;
    tile_product<F, BIAS, ZERO, N>(w, groups, acts + r, rows, to.at(r, 0), live, fetch, fetch_lines);
    r += N;
  };
  while (rows - r >= R) call(Rows<R>{});
  if constexpr (R == 16) {
    switch (rows - r) {
      case 15: return call(Rows<15>{});
      case 14: return call(Rows<14>{});
      case 13: return call(Rows<13>{});
      case 12: return call(Rows<12>{});
      case 11: return call(Rows<11>{});
      case 10: return call(Rows<10>{});
      case 9: return call(Rows<9>{});
      case 8: return call(Rows<8>{});
      case 7: return call(Rows<7>{});
      case 6: return call(Rows<6>{});
      case 5: return call(Rows<5>{});
    }
  }
  switch (rows - r) {
    case 4: return call(Rows<4>{});
    case 3: return call(Rows<3>{});
    case 2: return call(Rows<2>{});
    case 1: return call(Rows<1>{});
  }
}

inline int live_lanes(const Matrix& m, int tile) {
  const int left = m.n - tile * LANES;
  return left < LANES ? left : LANES;
}

// tile_product of one row and T tiles that lie `tile_bytes` apart, for weights that caches hold:
// activations are spread to lanes once for all, and nothing is asked for ahead (from memory, several
// tiles at a time arrive a third slower than one). The same integers and sums, in the same order.
template <bool BIAS, int ZERO, int T>
NOINLINE void cached_product(const uint8_t* tiles, size_t tile_bytes, int groups, const Act* acts,
                             const Output& to) {
  constexpr int bytes = 256 + (BIAS ? 64 : 32);
  S::F sum[T];
  for (int t = 0; t < T; ++t) sum[t] = S::zero();
  for (int g = 0; g < groups; ++g, tiles += bytes, ++acts) {
    S::I dot[T];
    S::tile_dots<T>(ZERO == 8 ? acts->minus_8sum : 0, tiles, tile_bytes, acts->q, dot);
    const S::F factor = S::set1(acts->scale), whole = S::set1(acts->scaled_sum);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const uint16_t* scales =
          reinterpret_cast<const uint16_t*>(tiles + size_t(t) * tile_bytes + 256);
      sum[t] = S::fma(S::load_half(scales), S::mul(S::to_float(dot[t]), factor), sum[t]);
      if (BIAS) sum[t] = S::fma(S::load_half(scales + LANES), whole, sum[t]);
    }
  }
  for (int t = 0; t < T; ++t) store_row(sum[t], to.at(0, t * LANES), 0, LANES);
}

// Tiles outside, row blocks inside: a tile stays in the first-level cache over all its blocks.
// One row a block (share 1) is the other way round: every row reads all the weights again.
template <Format F, bool BIAS, int ZERO>
void matmul_tiles(const Matrix& m, const Act* acts, int rows, int share, int tile0, int tile1,
                  const Output& to, Fetch& fetch) {
  const int groups = m.k / GROUP;
  const auto one = [&](int tile, int block) {
    const int r0 = block * share;
    const uint8_t* const on_the_way = fetch.take(groups);
    block_product<F, BIAS, ZERO>(
        m.data + size_t(tile) * m.tile_bytes(), groups, acts + size_t(r0) * groups,
        rows_in_block(rows, block, share), to.at(r0, tile * LANES), live_lanes(m, tile), on_the_way,
        on_the_way ? fetch.lines : 0);
  };
  const int blocks = (rows + share - 1) / share;
  if (share == 1) {
    for (int block = 0; block < blocks; ++block)
      for (int tile = tile0; tile < tile1; ++tile) one(tile, block);
  } else {
    for (int tile = tile0; tile < tile1; ++tile)
      for (int block = 0; block < blocks; ++block) one(tile, block);
  }
}

void matmul_quantized(const Matrix& m, const Act* acts, int rows, int share, int tile0, int tile1,
                      const Output& to, Fetch& fetch) {
  auto fn = matmul_tiles<Format::q8, false, 128>;
  if (m.format == Format::q4)
    fn = m.has_bias ? matmul_tiles<Format::q4, true, 0> : matmul_tiles<Format::q4, false, 8>;
  fn(m, acts, rows, share, tile0, tile1, to, fetch);
}

template <bool BIAS, int ZERO>
int cached_tiles(const Matrix& m, const Act* acts, int tile0, int tile1, const Output& to) {
  const int whole = m.n / LANES < tile1 ? m.n / LANES : tile1;
  const auto some = [&](auto count) {
    constexpr int T = decltype(count)::value;
    for (; tile0 + T <= whole; tile0 += T)
      cached_product<BIAS, ZERO, T>(m.data + size_t(tile0) * m.tile_bytes(), m.tile_bytes(),
                                    m.k / GROUP, acts, to.at(0, tile0 * LANES));
  };
  some(Rows<4>{});
  some(Rows<2>{});
  return tile0;
}

void matmul_cached(const Matrix& m, const Act* acts, int tile0, int tile1, const Output& to) {
  if (m.format == Format::q4)
    tile0 = (m.has_bias ? cached_tiles<true, 0> : cached_tiles<false, 8>)(m, acts, tile0, tile1, to);
  Fetch none;
  matmul_quantized(m, acts, 1, MAX_SHARE, tile0, tile1, to, none);
}

template <Format F>
inline S::F load_column(const uint8_t* p) {
  if (F == Format::f32) return S::load(reinterpret_cast<const float*>(p));
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(p);
  return F == Format::f16 ? S::load_half(halves) : S::load_bfloat(halves);
}

// The one inner product of dense weights: even and odd columns in two chains, then their sum.
template <Format F, int R>
inline void dense_product(const uint8_t* w, int k, const float* x, int ldx, S::F (&sum)[R]) {
  constexpr int bytes = F == Format::f32 ? 64 : 32;
  S::F odd[R];
  for (int r = 0; r < R; ++r) sum[r] = odd[r] = S::zero();
  int c = 0;
  for (; c + 1 < k; c += 2, w += 2 * bytes) {
    const S::F w0 = load_column<F>(w), w1 = load_column<F>(w + bytes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sum[r] = S::fma(w0, S::set1(x[size_t(r) * ldx + c]), sum[r]);
      odd[r] = S::fma(w1, S::set1(x[size_t(r) * ldx + c + 1]), odd[r]);
    }
  }
  if (c < k) {
    const S::F w0 = load_column<F>(w);
    for (int r = 0; r < R; ++r) sum[r] = S::fma(w0, S::set1(x[size_t(r) * ldx + c]), sum[r]);
  }
  for (int r = 0; r < R; ++r) sum[r] = S::add(sum[r], odd[r]);
}

template <Format F, int R>
void dense_tile(const Matrix& m, int tile, const float* x, int ldx, const Output& to) {
  S::F sum[R];
  dense_product<F, R>(m.data + size_t(tile) * m.tile_bytes(), m.k, x, ldx, sum);
  const int live = live_lanes(m, tile);
  for (int r = 0; r < R; ++r) store_row(sum[r], to.at(0, tile * LANES), r, live);
}

template <Format F>
void dense_tiles(const Matrix& m, const float* x, int ldx, int rows, int share, int tile0,
                 int tile1, const Output& to) {
  const auto one = [&](auto step, int tile, int r) {
    constexpr int R = decltype(step)::value;
    dense_tile<F, R>(m, tile, x + size_t(r) * ldx, ldx, to.at(r, 0));
  };
  if (share == 1) {
    for (int r = 0; r < rows; ++r)
      for (int tile = tile0; tile < tile1; ++tile) one(Rows<1>{}, tile, r);
    return;
  }
  for (int tile = tile0; tile < tile1; ++tile) {
    int r = 0;
    for (; r + 8 <= rows; r += 8) one(Rows<8>{}, tile, r);
    for (; r + 2 <= rows; r += 2) one(Rows<2>{}, tile, r);
    for (; r < rows; ++r) one(Rows<1>{}, tile, r);
  }
}

void matmul_dense(const Matrix& m, const float* x, int ldx, int rows, int share, int tile0,
                  int tile1, const Output& to) {
  auto fn = dense_tiles<Format::f32>;
  if (m.format == Format::f16) fn = dense_tiles<Format::f16>;
  if (m.format == Format::bf16) fn = dense_tiles<Format::bf16>;
  fn(m, x, ldx, rows, share, tile0, tile1, to);
}

}  // namespace
