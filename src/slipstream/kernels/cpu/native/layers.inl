// The small ops between matrix products: embedding, norm, gated activation, rotary embedding.
#pragma once

#include <cmath>

#include "linear.inl"

namespace {

// One row of a packed matrix as float32, dequantised exactly as the canonical form defines it.
void embed(const Matrix& m, int32_t id, float* out) {
  const int tile = id / LANES, lane = id % LANES;
  const uint8_t* p = m.data + size_t(tile) * m.tile_bytes();
  if (!m.quantized()) {
    for (int c = 0; c < m.k; ++c, p += m.block_bytes()) {
      float column[LANES];
      S::store(column, m.format == Format::f32   ? load_column<Format::f32>(p)
                       : m.format == Format::f16 ? load_column<Format::f16>(p)
                                                 : load_column<Format::bf16>(p));
      out[c] = column[lane];
    }
    return;
  }
  const bool q4 = m.format == Format::q4;
  const int codes = q4 ? 256 : 512, zero = m.zero_shift < 0 ? 0 : 1 << m.zero_shift;
  for (int c = 0; c < m.k; c += GROUP, p += m.block_bytes()) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(p + codes);
    const float scale = half_to_float(scales[lane]);
    const float bias = m.has_bias ? half_to_float(scales[LANES + lane]) : 0.0f;
    for (int i = 0; i < GROUP; ++i) {
      const int line = q4 ? i % 16 / 4 : i / 4;
      const uint8_t byte = p[64 * line + 4 * lane + i % 4];
      const int code = !q4 ? byte : i < 16 ? byte & 15 : byte >> 4;
      const float product = scale * float(code - zero);  // exact: at most 11 + 8 bits
      out[c + i] = m.has_bias ? product + bias : product;
    }
  }
}

// Sum of squares in two chains of sixteen lanes, then the fixed tree; a ragged end is one at a time.
void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  S::F even = S::zero(), odd = S::zero();
  int i = 0;
  for (; i + 32 <= n; i += 32) {
    const S::F a = S::load(x + i), b = S::load(x + i + 16);
    even = S::fma(a, a, even);
    odd = S::fma(b, b, odd);
  }
  float sum = S::sum(S::add(even, odd));
  for (; i < n; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(sum / float(n) + eps);
  const S::F factor = S::set1(inverse);
  for (i = 0; i + 16 <= n; i += 16)
    S::store(out + i, S::mul(S::mul(S::load(x + i), factor), S::load(weight + i)));
  for (; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

void gated(const float* gate, const float* up, int n, float* out) {
  const S::F one = S::set1(1.0f);
  const auto lanes = [&](const S::F& g, const S::F& u) {
    const S::F e = exp_lanes(S::sub(S::zero(), g));
    return S::mul(S::div(g, S::add(one, e)), u);
  };
  int i = 0;
  for (; i + 16 <= n; i += 16) S::store(out + i, lanes(S::load(gate + i), S::load(up + i)));
  if (i < n) {
    float g[16] = {}, u[16] = {};
    std::memcpy(g, gate + i, sizeof(float) * size_t(n - i));
    std::memcpy(u, up + i, sizeof(float) * size_t(n - i));
    float y[16];
    S::store(y, lanes(S::load(g), S::load(u)));
    std::memcpy(out + i, y, sizeof(float) * size_t(n - i));
  }
}

// Turn one head by its position's angles. The interleaved pairs of most files go sixteen columns at
// a time: x * cos + swapped x * (-sin, +sin), the same products and sums as pair by pair.
void rotate(const KVView& kv, int position, const float* x, float* out) {
  const int half = kv.head_dim / 2;
  const float* cos = kv.cos + size_t(position) * half;
  const float* sin = kv.sin + size_t(position) * half;
  if (kv.interleaved) {
    static constexpr float SIGNS[LANES] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    for (int i = 0; i < kv.head_dim; i += LANES) {
      const S::F columns = S::load(x + i);
      const S::F turned = S::mul(S::swap_pairs(columns),
                                 S::mul(S::spread(sin + i / 2), S::load(SIGNS)));
      S::store(out + i, S::add(S::mul(columns, S::spread(cos + i / 2)), turned));
    }
    return;
  }
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    out[i] = a * cos[i] - b * sin[i];
    out[i + half] = b * cos[i] + a * sin[i];
  }
}

// Units of a row are its query heads, then its KV heads; a padding row writes nothing.
void rope_append(const KVView& kv, const RowsView& rows, int row, int unit0, int unit1,
                 const float* qkv, float* q_out) {
  const int position = rows.positions[row];
  if (position < 0) return;
  const int d = kv.head_dim;
  const int32_t* table = rows.page_table + size_t(rows.sequences[row]) * rows.table_stride;
  const size_t page = size_t(table[position / LANES]) * kv.page_stride;
  const int slot = position % LANES;
  for (int unit = unit0; unit < unit1; ++unit) {
    if (unit < kv.heads) {
      rotate(kv, position, qkv + size_t(unit) * d, q_out + size_t(unit) * d);
      continue;
    }
    const int head = unit - kv.heads;
    const float* k = qkv + size_t(kv.heads + head) * d;
    const float* v = qkv + size_t(kv.heads + kv.kv_heads + head) * d;
    uint16_t* k_page = kv.k + page + size_t(head) * d * LANES + slot;
    uint16_t* v_page = kv.v + page + size_t(head) * d * LANES + size_t(slot) * d;
    float rotated[MAX_HEAD_DIM];
    uint16_t halves[MAX_HEAD_DIM];
    rotate(kv, position, k, rotated);
    for (int i = 0; i < d; i += LANES) S::store_half(halves + i, S::load(rotated + i));
    for (int i = 0; i < d; ++i) k_page[size_t(i) * LANES] = halves[i];
    for (int i = 0; i < d; i += LANES) S::store_half(v_page + i, S::load(v + i));
  }
}

// Index of the first largest of x[n0, n1); NaN never wins.
int32_t argmax(const float* x, int n0, int n1) {
  S::F best = S::set1(-INFINITY);
  int i = n0;
  for (; i + 16 <= n1; i += 16) best = S::max(S::load(x + i), best);
  float top = S::largest(best);
  for (; i < n1; ++i) top = x[i] > top ? x[i] : top;
  const S::F all = S::set1(top);
  for (i = n0; i + 16 <= n1; i += 16)
    if (const S::M hits = S::equal(S::load(x + i), all)) return i + __builtin_ctz(hits);
  for (; i < n1; ++i)
    if (x[i] == top) return i;
  return n0;
}

}  // namespace
