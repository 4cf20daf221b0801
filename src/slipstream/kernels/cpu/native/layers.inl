// The small ops between matrix products: rounding, embedding, norms, activations, soft-cap, rotary embedding.
#pragma once

#include <cmath>

#include "dense.inl"

namespace {

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
    float first, second;
    S::sums(qa, qb, first, second);  // whole numbers: exact, as is their sum
    const float sum = first + second;
    Act& act = out[size_t(g) * stride];
    S::store_int8(act.q, qa);
    S::store_int8(act.q + LANES, qb);
    act.scale = amax / 127.0f;
    act.scaled_sum = act.scale * sum;
    act.minus_8sum = -8 * int32_t(sum);
    act.minus_128sum = -128 * int32_t(sum);
    act.minus_32half[0] = -32 * int32_t(first);
    act.minus_32half[1] = -32 * int32_t(second);
  }
}

inline float bfloat_to_float(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// One of sixteen numbers that lie side by side.
inline float one_number(Numbers numbers, const uint8_t* p, int lane) {
  if (numbers == Numbers::f32) return reinterpret_cast<const float*>(p)[lane];
  const uint16_t half = reinterpret_cast<const uint16_t*>(p)[lane];
  return numbers == Numbers::bf16 ? bfloat_to_float(half) : half_to_float(half);
}

// The scale (which 0) or bias (1) of a unit's group in one lane.
inline float group_number(const Matrix& m, const uint8_t* unit, int which, int group, int lane) {
  const uint8_t* const numbers = unit + m.codes_bytes();
  const int groups = m.unit_groups(), width = m.numbers == Numbers::f32 ? 64 : 32;
  if (m.numbers != Numbers::two_level)
    return one_number(m.numbers, numbers + (which * groups + group) * width, lane);
  const uint8_t* const small = numbers + (m.has_bias ? 2 : 1) * width;
  return one_number(Numbers::f16, numbers + which * width, lane) *
         float(int8_t(small[(which * groups + group) * LANES + lane]));
}

// One row of a packed matrix as float32, dequantised exactly as the canonical form defines it.
void embed_row(const Matrix& m, int32_t id, float* out) {
  const int tile = id / LANES, lane = id % LANES;
  const uint8_t* p = m.data + size_t(tile) * m.tile_bytes();
  if (!m.quantized()) {
    const Numbers numbers = m.kind == Matrix::Kind::f32   ? Numbers::f32
                            : m.kind == Matrix::Kind::f16 ? Numbers::f16
                                                          : Numbers::bf16;
    const int step = m.kind == Matrix::Kind::f32 ? 64 : 32;
    for (int c = 0; c < m.k; ++c, p += step) out[c] = one_number(numbers, p, lane);
    return;
  }
  const int columns = m.unit_columns(), run = m.group < GROUP ? m.group : GROUP;
  for (int c = 0; c < m.k; c += columns, p += m.unit_bytes()) {
    for (int i = 0; i < columns; i += run) {
      const uint8_t* const block = p + i / GROUP * Matrix::code_bytes(m.bits);
      const float scale = group_number(m, p, 0, i / m.group, lane);
      const float bias = m.has_bias ? group_number(m, p, 1, i / m.group, lane) : 0.0f;
      for (int j = i; j < i + run; ++j) {
        const float product = scale * float(get_code(block, m.bits, lane, j % GROUP) - m.zero);
        out[c + j] = m.has_bias ? product + bias : product;
      }
    }
  }
}

void embed(const Matrix& m, int32_t id, float scale, float* out) {
  embed_row(m, id, out);
  if (scale == 1) return;
  for (int i = 0; i < m.k; ++i) out[i] *= scale;
}

// Sum of squares in two chains of sixteen lanes, then the fixed tree; a ragged end is one at a time.
inline float inverse_rms(const float* x, float eps, int n) {
  S::F even = S::zero(), odd = S::zero();
  int i = 0;
  for (; i + 32 <= n; i += 32) {
    const S::F a = S::load(x + i), b = S::load(x + i + 16);
    even = S::fma(a, a, even);
    odd = S::fma(b, b, odd);
  }
  float sum = S::sum(S::add(even, odd));
  for (; i < n; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / float(n) + eps);
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  const float inverse = inverse_rms(x, eps, n);
  const S::F factor = S::set1(inverse);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const S::F scaled = S::mul(S::load(x + i), factor);
    S::store(out + i, weight ? S::mul(scaled, S::load(weight + i)) : scaled);
  }
  for (; i < n; ++i) out[i] = weight ? x[i] * inverse * weight[i] : x[i] * inverse;
}

void norm_add(const float* residual, const float* x, const float* weight, float eps, float scale,
              int n, float* out) {
  const float inverse = inverse_rms(x, eps, n);
  const S::F factor = S::set1(inverse), after = S::set1(scale);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const S::F normed = S::mul(S::mul(S::load(x + i), factor), S::load(weight + i));
    S::store(out + i, S::mul(S::add(S::load(residual + i), normed), after));
  }
  for (; i < n; ++i) out[i] = (residual[i] + x[i] * inverse * weight[i]) * scale;
}

// One function for whole vectors and a ragged end, which is computed in a padded vector.
template <class Fn>
inline void over_lanes(int n, const float* a, const float* b, float* out, const Fn& fn) {
  int i = 0;
  for (; i + 16 <= n; i += 16) S::store(out + i, fn(S::load(a + i), S::load(b + i)));
  if (i == n) return;
  float x[16] = {}, y[16] = {};
  std::memcpy(x, a + i, sizeof(float) * size_t(n - i));
  std::memcpy(y, b + i, sizeof(float) * size_t(n - i));
  float z[16];
  S::store(z, fn(S::load(x), S::load(y)));
  std::memcpy(out + i, z, sizeof(float) * size_t(n - i));
}

// gelu_tanh(g) = g / 2 (1 + tanh(t)) is g / (1 + exp(-2 t)), so both activations are one.
void gated(const float* gate, const float* up, int n, Activation activation, float* out) {
  const S::F one = S::set1(1.0f);
  const auto divided = [&](const S::F& g, const S::F& exponent, const S::F& u) {
    return S::mul(S::div(g, S::add(one, exp_lanes(exponent))), u);
  };
  if (activation == Activation::silu) {
    over_lanes(n, gate, up, out, [&](const S::F& g, const S::F& u) {
      return divided(g, S::sub(S::zero(), g), u);
    });
    return;
  }
  const S::F twice = S::set1(-1.5957691216f);  // -2 sqrt(2 / pi)
  const S::F cubic = S::set1(0.044715f);
  over_lanes(n, gate, up, out, [&](const S::F& g, const S::F& u) {
    const S::F t = S::fma(S::mul(S::mul(g, g), g), cubic, g);
    return divided(g, S::mul(t, twice), u);
  });
}

void softcap(float* x, int n, float cap) {
  over_lanes(n, x, x, x, [&](const S::F& value, const S::F&) { return capped(value, cap); });
}

// Turn one head by its position's angles. The interleaved pairs of most GGUF files go sixteen columns
// at a time: x * cos + swapped x * (-sin, +sin), the same products and sums as pair by pair.
void turn(const Attention& a, int position, const float* x, float* out) {
  const int half = a.head_dim / 2;
  const float* cos = a.cos + size_t(position) * size_t(half);
  const float* sin = a.sin + size_t(position) * size_t(half);
  if (a.interleaved) {
    static constexpr float SIGNS[LANES] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    for (int i = 0; i < a.head_dim; i += LANES) {
      const S::F columns = S::load(x + i);
      const S::F turned = S::mul(S::swap_pairs(columns),
                                 S::mul(S::spread(sin + i / 2), S::load(SIGNS)));
      S::store(out + i, S::add(S::mul(columns, S::spread(cos + i / 2)), turned));
    }
    return;
  }
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    const S::F first = S::load(x + i), second = S::load(x + half + i);
    const S::F c = S::load(cos + i), s = S::load(sin + i);
    S::store(out + i, S::sub(S::mul(first, c), S::mul(second, s)));
    S::store(out + half + i, S::add(S::mul(second, c), S::mul(first, s)));
  }
  for (; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    out[i] = first * cos[i] - second * sin[i];
    out[i + half] = second * cos[i] + first * sin[i];
  }
}

inline void norm_and_turn(const Attention& a, const float* weight, float eps, int position,
                          const float* x, float* out) {
  float normed[MAX_HEAD_DIM];
  if (weight) {
    rms_norm(x, weight, eps, a.head_dim, normed);
    x = normed;
  }
  turn(a, position, x, out);
}

void rotate(const Attention& a, const HeadNorms& norms, int position, const float* x, float* out) {
  norm_and_turn(a, norms.q, norms.eps, position, x, out);
}

// Units of a row are its query heads, then its KV heads; a padding row writes nothing.
void rope_append(const KVView& kv, const HeadNorms& norms, const RowsView& rows, int row, int unit0,
                 int unit1, const float* qkv, float* q_out) {
  const int position = rows.positions[row];
  if (position < 0) return;
  const int d = kv.head_dim;
  const int32_t* table = rows.page_table + size_t(rows.sequences[row]) * rows.table_stride;
  const size_t page = size_t(table[position / LANES]) * kv.page_stride;
  const int slot = position % LANES;
  for (int unit = unit0; unit < unit1; ++unit) {
    if (unit < kv.heads) {
      rotate(kv, norms, position, qkv + size_t(unit) * d, q_out + size_t(unit) * d);
      continue;
    }
    const int head = unit - kv.heads;
    const float* k = qkv + size_t(kv.heads + head) * d;
    const float* v = kv.k_is_v ? k : k + size_t(kv.kv_heads) * d;
    uint16_t* k_page = kv.k + page + size_t(head) * d * LANES + slot;
    uint16_t* v_page = kv.v + page + size_t(head) * d * LANES + size_t(slot) * d;
    float rotated[MAX_HEAD_DIM], normed[MAX_HEAD_DIM];
    uint16_t halves[MAX_HEAD_DIM];
    norm_and_turn(kv, norms.k, norms.eps, position, k, rotated);
    for (int i = 0; i < d; i += LANES) S::store_half(halves + i, S::load(rotated + i));
    for (int i = 0; i < d; ++i) k_page[size_t(i) * LANES] = halves[i];
    if (kv.v_norm) {
      rms_norm(v, nullptr, norms.eps, d, normed);
      v = normed;
    }
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
