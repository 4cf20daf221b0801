// fp16 to float32 and back, without instructions for it.
#pragma once

#include <cstdint>
#include <cstring>

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

}  // namespace
