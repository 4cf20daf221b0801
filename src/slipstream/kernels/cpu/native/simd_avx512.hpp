// Sixteen lanes as one AVX-512 register (F, BW, DQ, VL, VNNI).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Simd {
  using F = __m512;
  using I = __m512i;
  using B = __m512i;
  static constexpr int max_rows = 16;     // rows whose sums fit the 32 registers beside 8 of weights
  static constexpr int tile_rows = 8;     // rows that two tiles side by side meet at once
  static constexpr int max_queries = 12;  // attention scores that one read of a page feeds

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_half(uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static F load_bfloat(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F rint(F a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F scale2(F a, F n) { return _mm512_scalef_ps(a, n); }
  // The first `live` lanes of x, `fill` elsewhere.
  static F keep(F x, int live, F fill) {
    return _mm512_mask_mov_ps(fill, __mmask16((1u << live) - 1u), x);
  }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static B load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static B low_nibbles(B b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
  static B high_nibbles(B b) {
    return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15));
  }
  static F load_int8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  // Bit v of a byte is the fifth of its code in w[v].
  static INLINE void add_fifth_bits(B bits, B (&w)[8]) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v)
      w[v] = _mm512_mask_add_epi8(w[v], _mm512_test_epi8_mask(bits, _mm512_set1_epi8(char(1 << v))),
                                  w[v], _mm512_set1_epi8(16));
  }
  // Bits 2 (v % 4) of a byte are the two upper ones of its code in w[v]; w[4] on have their own bytes.
  static INLINE void add_upper_bits(B first, B second, B (&w)[8]) {
    const __m512i place = _mm512_set1_epi8(0x30);
#pragma GCC unroll 2
    for (int v = 0; v < 8; v += 4) {
      const B bits = v ? second : first;
      w[v] = set_where(w[v], _mm512_slli_epi16(bits, 4), place);
      w[v + 1] = set_where(w[v + 1], _mm512_slli_epi16(bits, 2), place);
      w[v + 2] = set_where(w[v + 2], bits, place);
      w[v + 3] = set_where(w[v + 3], _mm512_srli_epi16(bits, 2), place);
    }
  }
  // For P rows: start + sum over a block's 32 columns, column 4 i + j being byte 4 l + j of w[i] in
  // lane l; of either half apart where there are two groups. Rows advance together, and one alone in
  // two chains, to hide latency: integers add exactly in any order.
  template <int P, int MAX_CODE, int GROUPS>
  static INLINE void dots(const int32_t (&start)[P * GROUPS], const B (&w)[8],
                          const int8_t* const (&x)[P], I (&sum)[P * GROUPS]) {
    I second = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 0; j < P * GROUPS; ++j) sum[j] = _mm512_set1_epi32(start[j]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      // Halves in turn, so that both chains advance.
      const int v = GROUPS == 2 ? i / 2 + i % 2 * 4 : i;
#pragma GCC unroll 4
      for (int j = 0; j < P; ++j) {
        int32_t four;
        std::memcpy(&four, x[j] + 4 * v, 4);
        I& chain = P * GROUPS == 1 && i % 2 ? second : sum[j * GROUPS + (GROUPS == 2 ? v / 4 : 0)];
        chain = _mm512_dpbusd_epi32(chain, w[v], _mm512_set1_epi32(four));
      }
    }
    if (P * GROUPS == 1) sum[0] = _mm512_add_epi32(sum[0], second);
  }
  // For T tiles, `tile_bytes` apart, and R rows, STRIDE bytes apart: start + sum over a block's 32
  // columns, of codes of 4 or 8 bits. Two vectors of codes at a time, so that two tiles and eight rows
  // have registers: what is read of the rows serves all tiles, and there are chains enough to hide
  // latency.
  template <int R, int T, int BITS, int STRIDE>
  static INLINE void tile_dots(const int32_t (&start)[R], const uint8_t* block, size_t tile_bytes,
                               const int8_t* x, I (&sum)[T * R]) {
#pragma GCC unroll 32
    for (int j = 0; j < T * R; ++j) sum[j] = _mm512_set1_epi32(start[j % R]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      B first[T], second[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const uint8_t* const line = block + size_t(t) * tile_bytes + 64 * i;
        const B codes = load_bytes(line);
        first[t] = BITS == 4 ? low_nibbles(codes) : codes;
        second[t] = BITS == 4 ? high_nibbles(codes) : load_bytes(line + 256);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int32_t four, other;
        std::memcpy(&four, x + r * STRIDE + 4 * i, 4);
        std::memcpy(&other, x + r * STRIDE + 4 * i + 16, 4);
        const __m512i a = _mm512_set1_epi32(four), b = _mm512_set1_epi32(other);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t)
          sum[t * R + r] = _mm512_dpbusd_epi32(sum[t * R + r], first[t], a);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t)
          sum[t * R + r] = _mm512_dpbusd_epi32(sum[t * R + r], second[t], b);
      }
    }
  }
  // Sixteen floats, already whole numbers in [-127, 127], as bytes.
  static void store_int8(int8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
  }
  // Eight floats, each twice in a row; and lanes 2 i and 2 i + 1 exchanged.
  static F spread(const float* p) {
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
  }
  static F swap_pairs(F x) { return _mm512_permute_ps(x, 0xb1); }
  static float sum(F x) { return _mm512_reduce_add_ps(x); }  // one fixed tree
  // The sums of two vectors, in any order.
  static void sums(F a, F b, float& of_a, float& of_b) {
    const __m512 lower = _mm512_shuffle_f32x4(a, b, 0x44), upper = _mm512_shuffle_f32x4(a, b, 0xee);
    __m512 x = _mm512_add_ps(lower, upper);  // a in the lower half, b in the upper
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
    of_a = _mm512_cvtss_f32(x);
    of_b = _mm_cvtss_f32(_mm512_extractf32x4_ps(x, 2));
  }
  static float largest(F x) { return _mm512_reduce_max_ps(x); }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static void prefetch_to_write(const void* p) { asm volatile("prefetchw (%0)" ::"r"(p)); }

  // What choosing a token needs besides: whole numbers of any size, masks, doubles, long products.
  using M = uint32_t;  // bit i is lane i
  using U = __m512i;   // eight 64-bit lanes
  struct D { __m512d low, high; };

  static F whole(F a) { return rint(a); }
  static M greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static M equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  // The live lanes of `from`, moved together; sixteen are written. `to` may be at or before `from`.
  template <class T>
  static void pack(T* to, const T* from, M live) {
    _mm512_storeu_si512(
        to, _mm512_maskz_compress_epi32(__mmask16(live), _mm512_loadu_si512(from)));
  }
  // The same of first, first + 1, ...
  static void pack_count(int32_t* to, int32_t first, M live) {
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(
                                __mmask16(live), _mm512_add_epi32(_mm512_set1_epi32(first), steps)));
  }
  static D none() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
  static D add(D sum, F x, M live) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    return {_mm512_mask_add_pd(sum.low, __mmask8(live), sum.low, low),
            _mm512_mask_add_pd(sum.high, __mmask8(live >> 8), sum.high, high)};
  }
  static double sum(D x) { return _mm512_reduce_add_pd(_mm512_add_pd(x.low, x.high)); }

  static U longs(uint64_t x) { return _mm512_set1_epi64(int64_t(x)); }
  // first + 0, 4, 1, 5, 2, 6, 3, 7: the order that `in_order` undoes.
  static U counters(uint64_t first) {
    return _mm512_add_epi64(longs(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  }
  // Products of the lower 32 bits.
  static U product(U a, U b) { return _mm512_mul_epu32(a, b); }
  static U upper(U a) { return _mm512_srli_epi64(a, 32); }
  static U exclusive_or(U a, U b, U c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
  // Eight numbers, each a quarter; and of each its word, number % 4.
  static U quarters(const int32_t* p) {
    return _mm512_srli_epi64(_mm512_cvtepu32_epi64(eight(p)), 2);
  }
  static U choose(const U (&word)[4], const int32_t* p) {
    const __m512i number = _mm512_cvtepu32_epi64(eight(p));
    const __mmask8 odd = _mm512_test_epi64_mask(number, _mm512_set1_epi64(1));
    const __mmask8 upper = _mm512_test_epi64_mask(number, _mm512_set1_epi64(2));
    return _mm512_mask_blend_epi64(upper, _mm512_mask_blend_epi64(odd, word[0], word[1]),
                                   _mm512_mask_blend_epi64(odd, word[2], word[3]));
  }
  // Lower 32 bits, unsigned.
  static F floats(U first, U second) {
    const __m512i low = _mm512_castsi256_si512(_mm512_cvtepi64_epi32(first));
    return _mm512_cvtepu32_ps(_mm512_inserti64x4(low, _mm512_cvtepi64_epi32(second), 1));
  }
  // Word j of counter i (lower 32 bits, unsigned) becomes float 4 i + j.
  static void in_order(const U (&word)[4], F& first, F& second) {
    const U a = _mm512_mask_blend_epi32(0xaaaa, word[0], _mm512_slli_epi64(word[1], 32));
    const U b = _mm512_mask_blend_epi32(0xaaaa, word[2], _mm512_slli_epi64(word[3], 32));
    first = _mm512_cvtepu32_ps(_mm512_unpacklo_epi64(a, b));
    second = _mm512_cvtepu32_ps(_mm512_unpackhi_epi64(a, b));
  }

 private:
  // a | (b & c)
  static B set_where(B a, B b, B c) { return _mm512_ternarylogic_epi32(a, b, c, 0xf8); }
  static __m256i eight(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
};

}  // namespace
