// The noise of sampling: Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random
// numbers: as easy as 1, 2, 3") from a counter, and the Gumbel variable that a word of it becomes.
//
// kernels/noise.py is the definition. No product is fused with a sum here, so both paths and
// numpy compute the same bytes.
#pragma once

#include "sampling.hpp"
#include "simd.hpp"

namespace {

using S = Simd;

constexpr uint32_t PHILOX_FACTORS[2] = {0xd2511f53u, 0xcd9e8d57u};
constexpr uint32_t PHILOX_KEY_STEPS[2] = {0x9e3779b9u, 0xbb67ae85u};
constexpr int PHILOX_ROUNDS = 10;
constexpr int NOISE_BLOCK = 32;  // tokens that one call of noise_block serves

// The 32 bits of one token: word token % 4 of counter (token / 4, position, choice, domain).
uint32_t noise_bits(const NoiseKey& key, uint32_t token) {
  uint32_t c[4] = {token / 4, key.position, key.choice, key.domain};
  uint32_t k[2] = {uint32_t(key.seed), uint32_t(key.seed >> 32)};
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    const uint64_t a = uint64_t(PHILOX_FACTORS[0]) * c[0];
    const uint64_t b = uint64_t(PHILOX_FACTORS[1]) * c[2];
    c[0] = uint32_t(b >> 32) ^ c[1] ^ k[0];
    c[1] = uint32_t(b);
    c[2] = uint32_t(a >> 32) ^ c[3] ^ k[1];
    c[3] = uint32_t(a);
    for (int i = 0; i < 2; ++i) k[i] += PHILOX_KEY_STEPS[i];
  }
  return c[token % 4];
}

// The words of eight counters; only the lower half of each 64-bit lane counts: a product reads no more
// of it.
inline void philox(const NoiseKey& key, const S::U& counters, S::U (&c)[4]) {
  c[0] = counters;
  c[1] = S::longs(key.position);
  c[2] = S::longs(key.choice);
  c[3] = S::longs(key.domain);
  const S::U factors[2] = {S::longs(PHILOX_FACTORS[0]), S::longs(PHILOX_FACTORS[1])};
  uint32_t k[2] = {uint32_t(key.seed), uint32_t(key.seed >> 32)};
#pragma GCC unroll 10
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    const S::U a = S::product(factors[0], c[0]), b = S::product(factors[1], c[2]);
    c[0] = S::exclusive_or(S::upper(b), c[1], S::longs(k[0]));
    c[2] = S::exclusive_or(S::upper(a), c[3], S::longs(k[1]));
    c[1] = b;
    c[3] = a;
    for (int i = 0; i < 2; ++i) k[i] += PHILOX_KEY_STEPS[i];
  }
}

// The bits of tokens first to first + 31, as floats; `first` is a multiple of 32.
inline void noise_block(const NoiseKey& key, uint32_t first, S::F& low, S::F& high) {
  S::U c[4];
  philox(key, S::counters(first / 4), c);
  S::in_order(c, low, high);
}

// The bits of sixteen tokens of any ids, as floats.
inline S::F noise_of(const NoiseKey& key, const int32_t* ids) {
  S::U words[2];
  for (int i = 0; i < 2; ++i) {
    S::U c[4];
    philox(key, S::quarters(ids + 8 * i), c);
    words[i] = S::choose(c, ids + 8 * i);
  }
  return S::floats(words[0], words[1]);
}

// Natural logarithm of a normal positive float: a = m 2**n with m in [0.7, 1.4], and
// log m = 2 artanh(s), s = (m - 1) / (m + 1); the series ends where a float does.
inline float log_of(float a) {
  int32_t bits;
  std::memcpy(&bits, &a, 4);
  const int32_t offset = bits - 0x3f333333;  // 0.7
  const float n = float(offset >> 23);
  bits = (offset & 0x7fffff) + 0x3f333333;
  float m;
  std::memcpy(&m, &bits, 4);
  const float f = m - 1.0f;
  const float s = f / (f + 2.0f), z = s * s;
  float p = 1.0f / 9;
  p = p * z + 1.0f / 7;
  p = p * z + 1.0f / 5;
  p = p * z + 1.0f / 3;
  const float twice = s + s;
  // ln 2 in two parts: a product of the first with an exponent is exact.
  return n * 0.693359375f + (twice + (twice * z * p - n * 2.12194440e-4f));
}

// -log(-log(1 - w)), w = (bits + 1/2) / 2**32: large values come from small w, which floats resolve.
float gumbel(uint32_t bits) {
  const float w = (float(bits) + 0.5f) * 0x1p-32f;
  const float clipped = w < 1 - 0x1p-24f ? w : 1 - 0x1p-24f;
  const float rest = 1.0f - clipped;
  // log1p by way of log, corrected for what 1 - w lost (Kahan).
  const float e = rest == 1.0f ? clipped : -log_of(rest) * (clipped / (1.0f - rest));
  return -log_of(e);
}

}  // namespace
