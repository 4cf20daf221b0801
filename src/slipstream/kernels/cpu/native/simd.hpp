// Sixteen-lane vectors, twice: AVX-512 and plain C++ that any compiler turns into what it has.
// Kernels are templates over one of the two, so both paths perform the same operations in the same
// order; only the fused multiply-add differs (the portable path rounds twice).
//
// Everything sits in an unnamed namespace: each translation unit keeps its own copy, compiled for
// its own instruction set, and the linker never shares one across.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

// One copy of each big template, called: a compiler left free copies them into every caller.
#if defined(_MSC_VER)
#define NOINLINE __declspec(noinline)
#else
#define NOINLINE __attribute__((noinline))
#endif

namespace {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {
    bits = 0x7f800000u | ((magnitude & 0x3ffu) << 13);
  } else {
    // Exponent re-bias by 2**112: exact for normal and subnormal halves alike.
    const uint32_t shifted = magnitude << 13;
    float f;
    std::memcpy(&f, &shifted, 4);
    f *= 5.192296858534828e+33f;
    std::memcpy(&bits, &f, 4);
  }
  bits |= sign;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t float_to_half(float f) {
  // Round to nearest even; overflow becomes infinity, as VCVTPS2PH does.
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // a subnormal half: let the adder round at bit 2**-24
    float magic;
    std::memcpy(&magic, &bits, 4);
    magic += 0.5f;
    std::memcpy(&bits, &magic, 4);
    return uint16_t(sign | (bits - 0x3f000000u));
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1u);
  return uint16_t(sign | (bits >> 13));
}

#if defined(__AVX512VNNI__)

struct Simd {
  using F = __m512;
  using I = __m512i;
  using B = __m512i;
  static constexpr int max_rows = 16;     // rows whose sums fit the 32 registers beside 8 of weights
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
  // For P rows: start + sum over a group's 32 columns, column 4 i + j being byte 4 l + j of w[i] in
  // lane l. Rows advance together, and one alone in two chains, to hide latency: integers add
  // exactly in any order.
  template <int P, int MAX_CODE>
  static void dots(const int32_t (&start)[P], const B (&w)[8], const int8_t* const (&x)[P],
                   I (&sum)[P]) {
    I second = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j) sum[j] = _mm512_set1_epi32(start[j]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < P; ++j) {
        int32_t four;
        std::memcpy(&four, x[j] + 4 * i, 4);
        I& chain = P == 1 && i % 2 ? second : sum[j];
        chain = _mm512_dpbusd_epi32(chain, w[i], _mm512_set1_epi32(four));
      }
    }
    if (P == 1) sum[0] = _mm512_add_epi32(sum[0], second);
  }
  // dots of one row and T tiles of 4-bit codes, each four lines of 64 bytes. The upper codes stay
  // where they are, sixteen times too large until the end.
  template <int T>
  static void tile_dots(int32_t start, const uint8_t* tiles, size_t stride, const int8_t* x,
                        I (&sum)[T]) {
    const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(char(0xf0));
    I upper[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      sum[t] = _mm512_set1_epi32(start);
      upper[t] = _mm512_setzero_si512();
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      int32_t a, b;
      std::memcpy(&a, x + 4 * i, 4);
      std::memcpy(&b, x + 16 + 4 * i, 4);
      const __m512i first = _mm512_set1_epi32(a), second = _mm512_set1_epi32(b);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const B both = load_bytes(tiles + size_t(t) * stride + 64 * i);
        sum[t] = _mm512_dpbusd_epi32(sum[t], _mm512_and_si512(both, low), first);
        upper[t] = _mm512_dpbusd_epi32(upper[t], _mm512_and_si512(both, high), second);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
      sum[t] = _mm512_add_epi32(sum[t], _mm512_srai_epi32(upper[t], 4));
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
  static float largest(F x) { return _mm512_reduce_max_ps(x); }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

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
  static __m256i eight(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
};

#else

struct Simd {
  struct alignas(64) F { float v[16]; };
  struct alignas(64) I { int32_t v[16]; };
  struct alignas(64) B { uint8_t v[64]; };
  static constexpr int max_rows = 4;
  static constexpr int max_queries = 3;

  template <class Fn>
  static F map(Fn fn) {
    F out;
    for (int i = 0; i < 16; ++i) out.v[i] = fn(i);
    return out;
  }
  static F zero() { return map([](int) { return 0.0f; }); }
  static F set1(float x) { return map([x](int) { return x; }); }
  static F load(const float* p) { return map([p](int i) { return p[i]; }); }
  static void store(float* p, const F& x) { std::memcpy(p, x.v, 64); }
  static F load_half(const uint16_t* p) { return map([p](int i) { return half_to_float(p[i]); }); }
  static void store_half(uint16_t* p, const F& x) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_half(x.v[i]);
  }
  static F load_bfloat(const uint16_t* p) {
    F out;
    for (int i = 0; i < 16; ++i) {
      const uint32_t bits = uint32_t(p[i]) << 16;
      std::memcpy(&out.v[i], &bits, 4);
    }
    return out;
  }
  static F add(const F& a, const F& b) { return map([&](int i) { return a.v[i] + b.v[i]; }); }
  static F sub(const F& a, const F& b) { return map([&](int i) { return a.v[i] - b.v[i]; }); }
  static F mul(const F& a, const F& b) { return map([&](int i) { return a.v[i] * b.v[i]; }); }
  static F div(const F& a, const F& b) { return map([&](int i) { return a.v[i] / b.v[i]; }); }
  static F max(const F& a, const F& b) {
    return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F min(const F& a, const F& b) {
    return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F abs(const F& a) { return map([&](int i) { return a.v[i] < 0 ? -a.v[i] : a.v[i]; }); }
  static F fma(const F& a, const F& b, const F& c) {
    return map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static F spread(const float* p) { return map([p](int i) { return p[i / 2]; }); }
  static F swap_pairs(const F& x) { return map([&](int i) { return x.v[i ^ 1]; }); }
  static F rint(const F& a) {
    // Adding 1.5 * 2**23 leaves no fraction bits; valid for |a| < 2**22, all that callers need.
    return map([&](int i) {
      volatile float shifted = a.v[i] + 12582912.0f;
      return shifted - 12582912.0f;
    });
  }
  static F scale2(const F& a, const F& n) {
    return map([&](int i) {
      const int e = int(n.v[i]);
      if (e < -126) return 0.0f;
      const uint32_t bits = uint32_t(e + 127) << 23;
      float power;
      std::memcpy(&power, &bits, 4);
      return a.v[i] * power;
    });
  }
  static F keep(const F& x, int live, const F& fill) {
    return map([&](int i) { return i < live ? x.v[i] : fill.v[i]; });
  }
  static F to_float(const I& x) { return map([&](int i) { return float(x.v[i]); }); }
  static B load_bytes(const uint8_t* p) {
    B out;
    std::memcpy(out.v, p, 64);
    return out;
  }
  static B low_nibbles(const B& b) {
    B out;
    for (int i = 0; i < 64; ++i) out.v[i] = b.v[i] & 15;
    return out;
  }
  static B high_nibbles(const B& b) {
    B out;
    for (int i = 0; i < 64; ++i) out.v[i] = b.v[i] >> 4;
    return out;
  }
  // As above, in 16-bit lanes, which every machine multiplies (16-byte vectors of GCC and Clang).
  // Eight products of a 4-bit code and an int8 sum to at most 15,240, so they stay in 16 bits;
  // products of 8-bit codes widen at once.
  template <int P, int MAX_CODE>
  static void dots(const int32_t (&start)[P], const B (&w)[8], const int8_t* const (&x)[P],
                   I (&sum)[P]) {
    for (int j = 0; j < P; ++j) sum[j] = dot<MAX_CODE>(start[j], w, x[j]);
  }
  template <int MAX_CODE>
  static I dot(int32_t start, const B (&w)[8], const int8_t* x) {
    Shorts sums[8] = {};
    Ints pairs[8] = {};
    for (int i = 0; i < 8; ++i) {
      const Shorts four = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3],
                           x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
      for (int part = 0; part < 4; ++part) {
        Bytes bytes;
        std::memcpy(&bytes, w[i].v + 16 * part, 16);
        const Shorts low = widen<0>(bytes) * four;
        const Shorts high = widen<8>(bytes) * four;
        if (MAX_CODE < 16) {
          sums[2 * part] += low;
          sums[2 * part + 1] += high;
        } else {
          pairs[2 * part] += halves(low);
          pairs[2 * part + 1] += halves(high);
        }
      }
    }
    I out;
    for (int j = 0; j < 8; ++j) {
      const Ints pair = MAX_CODE < 16 ? halves(sums[j]) : pairs[j];
      out.v[2 * j] = start + pair[0] + pair[1];
      out.v[2 * j + 1] = start + pair[2] + pair[3];
    }
    return out;
  }
  template <int T>
  static void tile_dots(int32_t start, const uint8_t* tiles, size_t stride, const int8_t* x,
                        I (&sum)[T]) {
    for (int t = 0; t < T; ++t) {
      B w[8];
      for (int i = 0; i < 4; ++i) {
        const B both = load_bytes(tiles + size_t(t) * stride + 64 * i);
        w[i] = low_nibbles(both);
        w[i + 4] = high_nibbles(both);
      }
      sum[t] = dot<15>(start, w, x);
    }
  }
  static void store_int8(int8_t* p, const F& x) {
    for (int i = 0; i < 16; ++i) p[i] = int8_t(int(x.v[i]));
  }
  // One fixed tree: neighbours eight, four, two, one apart.
  static float sum(F x) {
    for (int half = 8; half; half /= 2)
      for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
    return x.v[0];
  }
  static float largest(F x) {
    for (int half = 8; half; half /= 2)
      for (int i = 0; i < half; ++i) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
    return x.v[0];
  }
  static void prefetch(const void* p) { __builtin_prefetch(p); }

  using M = uint32_t;
  struct alignas(64) U { uint64_t v[8]; };
  struct alignas(64) D { double v[16]; };

  static F whole(const F& a) {
    // Nothing from 2**23 on has a fraction.
    return map([&](int i) {
      const float rounded = (a.v[i] + 8388608.0f) - 8388608.0f;
      return a.v[i] < 8388608.0f ? rounded : a.v[i];
    });
  }
  static M greater(const F& a, const F& b) {
    M bits = 0;
    for (int i = 0; i < 16; ++i) bits |= M(a.v[i] > b.v[i]) << i;
    return bits;
  }
  static M equal(const F& a, const F& b) {
    M bits = 0;
    for (int i = 0; i < 16; ++i) bits |= M(a.v[i] == b.v[i]) << i;
    return bits;
  }
  template <class T>
  static void pack(T* to, const T* from, M live) {
    for (; live; live &= live - 1) *to++ = from[__builtin_ctz(live)];
  }
  static void pack_count(int32_t* to, int32_t first, M live) {
    for (; live; live &= live - 1) *to++ = first + __builtin_ctz(live);
  }
  static D none() { return {}; }
  static D add(D sum, const F& x, M live) {
    for (int i = 0; i < 16; ++i) sum.v[i] += (live >> i) & 1 ? double(x.v[i]) : 0.0;
    return sum;
  }
  static double sum(const D& x) {
    double out = 0;
    for (int i = 0; i < 16; ++i) out += x.v[i];
    return out;
  }

  template <class Fn>
  static U map_longs(Fn fn) {
    U out;
    for (int i = 0; i < 8; ++i) out.v[i] = fn(i);
    return out;
  }
  static U longs(uint64_t x) { return map_longs([x](int) { return x; }); }
  static U counters(uint64_t first) {
    return map_longs([first](int i) { return first + uint64_t(i / 2 + i % 2 * 4); });
  }
  static U product(const U& a, const U& b) {
    return map_longs([&](int i) { return uint64_t(uint32_t(a.v[i])) * uint32_t(b.v[i]); });
  }
  static U upper(const U& a) { return map_longs([&](int i) { return a.v[i] >> 32; }); }
  static U exclusive_or(const U& a, const U& b, const U& c) {
    return map_longs([&](int i) { return a.v[i] ^ b.v[i] ^ c.v[i]; });
  }
  static U quarters(const int32_t* p) {
    return map_longs([p](int i) { return uint64_t(uint32_t(p[i])) / 4; });
  }
  static U choose(const U (&word)[4], const int32_t* p) {
    return map_longs([&](int i) { return word[uint32_t(p[i]) % 4].v[i]; });
  }
  static F floats(const U& first, const U& second) {
    return map([&](int i) { return float(uint32_t(i < 8 ? first.v[i] : second.v[i - 8])); });
  }
  static void in_order(const U (&word)[4], F& first, F& second) {
    for (int i = 0; i < 16; ++i) {
      first.v[i] = float(uint32_t(word[i % 4].v[i / 4 * 2]));
      second.v[i] = float(uint32_t(word[i % 4].v[i / 4 * 2 + 1]));
    }
  }

 private:
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  typedef int16_t Shorts __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  // Eight bytes from `first` beside zero bytes are eight 16-bit lanes (little-endian machines).
  template <int FIRST>
  static Shorts widen(Bytes b) {
    return Shorts(__builtin_shufflevector(b, Bytes{}, FIRST, 16, FIRST + 1, 16, FIRST + 2, 16,
                                          FIRST + 3, 16, FIRST + 4, 16, FIRST + 5, 16, FIRST + 6,
                                          16, FIRST + 7, 16));
  }
  // The two 16-bit halves of every 32 bits, added.
  static Ints halves(Shorts x) { return ((Ints(x) << 16) >> 16) + (Ints(x) >> 16); }
};

#endif

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
