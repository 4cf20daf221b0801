// Products of quantized matrices, written once over Simd and over what is known of a matrix.
//
// A vector's sixteen lanes are sixteen output rows, so nothing is ever summed across lanes. Weights
// meet activations rounded to int8 a block of 32 at a time; the integer dot product of a group is
// exact, and blocks are added in order in float32. That order is all that matters, and it is the same
// for every number of rows.
#pragma once

#include "rows.inl"

namespace {

constexpr int ASKED = -1;  // what is asked of the matrix when it is multiplied

// A kind of matrix.
//   BITS     of a code
//   GROUPS   groups in a block of 32 columns: 2 for groups of 16, else 1
//   BLOCKS   in a unit
//   NUMBERS  what scales and biases are
//   ZERO     the code that stands for 0 before the bias
template <int BITS_, int GROUPS_, int BLOCKS_, int NUMBERS_, int ZERO_, int BIAS_>
struct Kind {
  static constexpr int BITS = BITS_, GROUPS = GROUPS_, ZERO = ZERO_;
  static constexpr bool BIAS = BIAS_ != 0;
  static constexpr int CODES = Matrix::code_bytes(BITS);

  // What a loop needs of the matrix, constants where the kind knows them.
  int blocks, groups, zero;
  bool has_bias;
  Numbers numbers;

  explicit Kind(const Matrix& m)
      : blocks(BLOCKS_ != ASKED ? BLOCKS_ : m.unit_columns() / GROUP),
        groups(BLOCKS_ != ASKED && NUMBERS_ != ASKED ? BLOCKS_ * GROUPS : m.unit_groups()),
        zero(ZERO != ASKED ? ZERO : m.zero),
        has_bias(BIAS_ != ASKED ? BIAS_ != 0 : m.has_bias),
        numbers(NUMBERS_ != ASKED ? Numbers(NUMBERS_) : m.numbers) {}

  int group_of(int block) const { return GROUPS == 2 ? 2 * block : block * groups / blocks; }
  int number_bytes() const { return numbers == Numbers::f32 ? 64 : 32; }
  size_t unit_bytes() const {
    const size_t kinds = has_bias ? 2 : 1, codes = size_t(CODES) * size_t(blocks);
    if (numbers != Numbers::two_level)
      return codes + kinds * size_t(groups) * size_t(number_bytes());
    return (codes + kinds * (32 + LANES * size_t(groups)) + 63) / 64 * 64;
  }
};

constexpr int F16 = int(Numbers::f16), TWO_LEVEL = int(Numbers::two_level);
using Q4Zero = Kind<4, 1, 1, F16, 8, 0>;
using Q4Bias = Kind<4, 1, 1, F16, 0, 1>;
using Q8Zero = Kind<8, 1, 1, F16, 128, 0>;
using Q4Super = Kind<4, 1, 8, TWO_LEVEL, 0, 1>;
using Q5Super = Kind<5, 1, 8, TWO_LEVEL, 0, 1>;
using Q6Super = Kind<6, 2, 8, TWO_LEVEL, 32, 0>;
template <int BITS, int GROUPS>
using Other = Kind<BITS, GROUPS, ASKED, ASKED, ASKED, ASKED>;

// Whether a kind that asks nothing is that of a matrix.
template <class K>
bool is_kind(const Matrix& m) {
  const K kind(m);
  return m.bits == K::BITS && m.zero == kind.zero && m.has_bias == kind.has_bias &&
         m.numbers == kind.numbers && m.unit_columns() == kind.blocks * GROUP &&
         m.unit_groups() == kind.groups;
}

// The scales and biases of one unit.
template <class K>
struct UnitNumbers {
  const K& kind;
  const uint8_t* p;
  S::F scale_super = S::zero(), bias_super = S::zero();

  INLINE UnitNumbers(const K& kind, const uint8_t* p) : kind(kind), p(p) {
    if (kind.numbers != Numbers::two_level) return;
    scale_super = S::load_half(reinterpret_cast<const uint16_t*>(p));
    if (kind.has_bias) bias_super = S::load_half(reinterpret_cast<const uint16_t*>(p + 32));
  }
  INLINE S::F scale(int group) const { return number(group, scale_super, 0); }
  INLINE S::F bias(int group) const {
    return kind.has_bias ? number(group, bias_super, kind.groups) : S::zero();
  }

 private:
  INLINE S::F number(int group, const S::F& super, int first) const {
    const int at = first + group;
    switch (kind.numbers) {
      case Numbers::two_level:
        return S::mul(super, S::load_int8(p + (kind.has_bias ? 64 : 32) + at * LANES));
      case Numbers::f32: return S::load(reinterpret_cast<const float*>(p + at * 64));
      case Numbers::bf16: return S::load_bfloat(reinterpret_cast<const uint16_t*>(p + at * 32));
      default: return S::load_half(reinterpret_cast<const uint16_t*>(p + at * 32));
    }
  }
};

// A block's codes, vector v the columns 4 v to 4 v + 3.
template <int BITS>
INLINE void unpack(const uint8_t* p, S::B (&w)[8]) {
  if (BITS == 8) {
    for (int v = 0; v < 8; ++v) w[v] = S::load_bytes(p + 64 * v);
    return;
  }
  for (int v = 0; v < 4; ++v) {
    const S::B both = S::load_bytes(p + 64 * v);
    w[v] = S::low_nibbles(both);
    w[v + 4] = S::high_nibbles(both);
  }
  if (BITS == 5) S::add_fifth_bits(S::load_bytes(p + 256), w);
  if (BITS == 6) S::add_upper_bits(S::load_bytes(p + 256), S::load_bytes(p + 320), w);
}

// Where an integer dot product starts, so that it is one with code - zero.
template <class K>
INLINE int32_t start_of(const K& kind, const Act& act, int half) {
  if (K::ZERO == 0) return 0;
  if (K::GROUPS == 2)
    return K::ZERO == 32 ? act.minus_32half[half] : act.minus_32half[half] * kind.zero / 32;
  if (K::ZERO == 8) return act.minus_8sum;
  if (K::ZERO == 128) return act.minus_128sum;
  return (act.minus_32half[0] + act.minus_32half[1]) * kind.zero / 32;
}

// Add a group's product to one row's sum.
template <class K>
INLINE void add_dot(const S::I& dot, const S::F& scale, const S::F& bias, const Act& act, S::F& sum) {
  sum = S::fma(scale, S::mul(S::to_float(dot), S::set1(act.scale)), sum);
  if (K::BIAS) sum = S::fma(bias, S::set1(act.scaled_sum), sum);
}

// Add one block's product to the sums of P rows.
template <class K, int P>
INLINE void add_block(const K& kind, const S::B (&w)[8], const S::F (&scale)[K::GROUPS],
                      const S::F (&bias)[K::GROUPS], const Act* acts, S::F* sum) {
  constexpr int G = K::GROUPS;
  int32_t start[P * G];
  const int8_t* x[P];
  S::I dot[P * G];
#pragma GCC unroll 4
  for (int j = 0; j < P; ++j) {
    for (int h = 0; h < G; ++h) start[j * G + h] = start_of(kind, acts[j], h);
    x[j] = acts[j].q;
  }
  S::dots<P, (1 << K::BITS) - 1, G>(start, w, x, dot);
#pragma GCC unroll 4
  for (int j = 0; j < P; ++j) {
    if (G == 1) {
      add_dot<K>(dot[j], scale[0], bias[0], acts[j], sum[j]);
      continue;
    }
    const S::F factor = S::set1(acts[j].scale);
    const S::F first = S::mul(S::to_float(dot[j * G]), scale[0]);
    sum[j] = S::fma(S::fma(S::to_float(dot[j * G + G - 1]), scale[G - 1], first), factor, sum[j]);
    if (!K::BIAS) continue;
    for (int h = 0; h < G; ++h) {
      const float whole = acts[j].scale * float(acts[j].minus_32half[h]) * (-1.0f / 32);
      sum[j] = S::fma(bias[h], S::set1(whole), sum[j]);
    }
  }
}

// The one inner product of quantized weights: R rows share the weights of one tile. `stride` is the
// number of rows in the activation block, R of which start at `acts`.
template <class K, int R>
NOINLINE void tile_product(const Matrix& m, const uint8_t* w_data, const Act* acts, int stride,
                           const Output& to, int live, const uint8_t* fetch, int fetch_lines) {
  constexpr int AT_ONCE = K::GROUPS == 2 ? 2 : 4;  // rows whose dot products fit the registers
  constexpr int WHOLE = R / AT_ONCE * AT_ONCE;
  // Measured best of 0 to 16 KiB: memory delivers about that while it answers once. More rows take
  // longer over a byte and keep more activations in the first cache.
  constexpr int ahead = R <= 2 ? 8192 : 4096;
  const K kind(m);
  const size_t codes = size_t(K::CODES) * size_t(kind.blocks), bytes = kind.unit_bytes();
  S::F sum[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sum[r] = S::zero();
  const uint8_t* const end = w_data + size_t(m.k / GROUP / kind.blocks) * bytes;
  for (; w_data != end; w_data += bytes) {
    const UnitNumbers<K> numbers(kind, w_data + codes);
    for (size_t i = codes; i < bytes; i += 64) S::prefetch(w_data + ahead + i);
    const uint8_t* block = w_data;
    for (int b = 0; b < kind.blocks; ++b, block += K::CODES, acts += stride) {
      for (int i = 0; i < K::CODES; i += 64) S::prefetch(block + ahead + i);
      if constexpr (R > 2)  // fewer rows are as fast as their weights arrive: nothing is asked for
        for (int i = 0; i < fetch_lines; ++i, fetch += 64) S::prefetch(fetch);
      S::B w[8];
      unpack<K::BITS>(block, w);
      S::F scale[K::GROUPS], bias[K::GROUPS];
      for (int h = 0; h < K::GROUPS; ++h) {
        scale[h] = numbers.scale(kind.group_of(b) + h);
        bias[h] = K::BIAS ? numbers.bias(kind.group_of(b) + h) : S::zero();
      }
#pragma GCC unroll 8
      for (int r = 0; r < WHOLE; r += AT_ONCE)
        add_block<K, AT_ONCE>(kind, w, scale, bias, acts + r, sum + r);
      if constexpr (R > WHOLE)
        add_block<K, R - WHOLE>(kind, w, scale, bias, acts + WHOLE, sum + WHOLE);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store_row(sum[r], to, r, live);
}

// tile_product for any number of rows up to MAX_SHARE, in as few reads as registers allow.
template <class K, int R = S::max_rows>
NOINLINE void block_product(const Matrix& m, const uint8_t* w, const Act* acts, int rows,
                            const Output& to, int live, const uint8_t* fetch, int fetch_lines) {
  int r = 0;
  const auto call = [&](auto width) {
    constexpr int N = decltype(width)::value;
    tile_product<K, N>(m, w, acts + r, rows, to.at(r, 0), live, fetch, fetch_lines);
    r += N;
  };
  while (rows - r >= R) call(Rows<R>{});
  if constexpr (R == 16) {
    if (rows - r >= 8) call(Rows<8>{});
    if (rows - r > 4) call(Rows<4>{});
  }
  switch (rows - r) {
    case 4: return call(Rows<4>{});
    case 3: return call(Rows<3>{});
    case 2: return call(Rows<2>{});
    case 1: return call(Rows<1>{});
  }
}

}  // namespace
