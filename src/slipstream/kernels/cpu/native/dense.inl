// Products of dense matrices: float32 activations, a column of sixteen weights at a time.
#pragma once

#include "rows.inl"

namespace {

template <Matrix::Kind F>
INLINE S::F load_column(const uint8_t* p) {
  if (F == Matrix::Kind::f32) return S::load(reinterpret_cast<const float*>(p));
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(p);
  return F == Matrix::Kind::f16 ? S::load_half(halves) : S::load_bfloat(halves);
}

// The one inner product of dense weights: even and odd columns in two chains, then their sum.
template <Matrix::Kind F, int R>
INLINE void dense_product(const uint8_t* w, int k, const float* x, int ldx, S::F (&sum)[R]) {
  constexpr int bytes = F == Matrix::Kind::f32 ? 64 : 32;
  constexpr int ahead = 8192;  // as products of quantized matrices have it
  S::F odd[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r] = odd[r] = S::zero();
  int c = 0;
  for (; c + 1 < k; c += 2, w += 2 * bytes) {
    for (int i = 0; i < 2 * bytes; i += 64) S::prefetch(w + ahead + i);
    const S::F w0 = load_column<F>(w), w1 = load_column<F>(w + bytes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sum[r] = S::fma(w0, S::set1(x[size_t(r) * ldx + c]), sum[r]);
      odd[r] = S::fma(w1, S::set1(x[size_t(r) * ldx + c + 1]), odd[r]);
    }
  }
  if (c < k) {
    const S::F w0 = load_column<F>(w);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r] = S::fma(w0, S::set1(x[size_t(r) * ldx + c]), sum[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r] = S::add(sum[r], odd[r]);
}

template <Matrix::Kind F, int R>
NOINLINE void dense_tile(const Matrix& m, int tile, const float* x, int ldx, const Output& to) {
  S::F sum[R];
  dense_product<F, R>(m.data + size_t(tile) * m.tile_bytes(), m.k, x, ldx, sum);
  const int live = live_lanes(m, tile);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store_row(sum[r], to.at(0, tile * LANES), r, live);
}

template <Matrix::Kind F>
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
    if constexpr (S::max_rows > 4) {
      switch (rows - r) {
        case 7: one(Rows<7>{}, tile, r); continue;
        case 6: one(Rows<6>{}, tile, r); continue;
        case 5: one(Rows<5>{}, tile, r); continue;
      }
    }
    if (rows - r >= 4) one(Rows<4>{}, tile, r), r += 4;
    switch (rows - r) {
      case 3: one(Rows<3>{}, tile, r); break;
      case 2: one(Rows<2>{}, tile, r); break;
      case 1: one(Rows<1>{}, tile, r); break;
    }
  }
}

void matmul_dense(const Matrix& m, const float* x, int ldx, int rows, int share, int tile0,
                  int tile1, const Output& to) {
  auto fn = dense_tiles<Matrix::Kind::f32>;
  if (m.kind == Matrix::Kind::f16) fn = dense_tiles<Matrix::Kind::f16>;
  if (m.kind == Matrix::Kind::bf16) fn = dense_tiles<Matrix::Kind::bf16>;
  fn(m, x, ldx, rows, share, tile0, tile1, to);
}

}  // namespace
