// Sixteen lanes in plain C++ that any compiler turns into what it has.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.hpp"

namespace {

struct Simd {
  struct alignas(64) F { float v[16]; };
  struct alignas(64) I { int32_t v[16]; };
  struct alignas(64) B { uint8_t v[64]; };
  static constexpr int max_rows = 4;
  static constexpr int tile_rows = 0;  // tiles go one by one
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
  static F load_int8(const uint8_t* p) { return map([p](int i) { return float(int8_t(p[i])); }); }
  static void add_fifth_bits(const B& bits, B (&w)[8]) {
    for (int v = 0; v < 8; ++v)
      for (int i = 0; i < 64; ++i) w[v].v[i] = uint8_t(w[v].v[i] | (bits.v[i] >> v & 1) << 4);
  }
  static void add_upper_bits(const B& first, const B& second, B (&w)[8]) {
    for (int v = 0; v < 8; ++v) {
      const B& bits = v < 4 ? first : second;
      for (int i = 0; i < 64; ++i)
        w[v].v[i] = uint8_t(w[v].v[i] | (bits.v[i] >> v % 4 * 2 & 3) << 4);
    }
  }
  // As above, in 16-bit lanes, which every machine multiplies (16-byte vectors of GCC and Clang).
  // Eight products of a code below 32 and an int8 sum to at most 31,496, four of one below 64 to
  // 32,004, so they stay in 16 bits; products of 8-bit codes widen at once.
  template <int P, int MAX_CODE, int GROUPS>
  static void dots(const int32_t (&start)[P * GROUPS], const B (&w)[8], const int8_t* const (&x)[P],
                   I (&sum)[P * GROUPS]) {
    for (int j = 0; j < P; ++j) {
      if (GROUPS == 1) {
        sum[j] = dot<MAX_CODE, 0, 8>(start[j], w, x[j]);
        continue;
      }
      sum[j * GROUPS] = dot<MAX_CODE, 0, 4>(start[j * GROUPS], w, x[j]);
      sum[j * GROUPS + GROUPS - 1] = dot<MAX_CODE, 4, 8>(start[j * GROUPS + GROUPS - 1], w, x[j]);
    }
  }
  template <int MAX_CODE, int FIRST, int END>
  static I dot(int32_t start, const B (&w)[8], const int8_t* x) {
    constexpr bool narrow = (END - FIRST) * MAX_CODE * 127 < 32768;
    Shorts sums[8] = {};
    Ints pairs[8] = {};
    for (int i = FIRST; i < END; ++i) {
      const Shorts four = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3],
                           x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
      for (int part = 0; part < 4; ++part) {
        Bytes bytes;
        std::memcpy(&bytes, w[i].v + 16 * part, 16);
        const Shorts low = widen<0>(bytes) * four;
        const Shorts high = widen<8>(bytes) * four;
        if (narrow) {
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
      const Ints pair = narrow ? halves(sums[j]) : pairs[j];
      out.v[2 * j] = start + pair[0] + pair[1];
      out.v[2 * j + 1] = start + pair[2] + pair[3];
    }
    return out;
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
  static void sums(const F& a, const F& b, float& of_a, float& of_b) {
    of_a = sum(a);
    of_b = sum(b);
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

}  // namespace
