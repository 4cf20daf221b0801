// Packed matrices: where codes and their groups' numbers lie.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int LANES = 16;   // output rows of a weight tile, positions of a KV page
constexpr int GROUP = 32;   // columns that share one activation scale
constexpr int SUPER = 256;  // columns that share the first of two levels

// What the scales and biases of a matrix are: one number a group, or in two levels an fp16 number for
// 256 columns times an int8 for each group.
enum class Numbers : int { f16, bf16, f32, two_level };

// One packed matrix of N rows and K columns, as tiles of 16 rows in order of use.
//
// Quantized: a tile is a run of units, a unit the columns of one group, of at least one block of 32, or
// of 256 in two levels. A unit holds the codes of its blocks, then the numbers. Codes of a block:
// byte b of 64-byte line i < 4 holds columns 4 i + b % 4 (low nibble) and 16 + 4 i + b % 4 (high) of row
// b / 4. The upper bits of codes of five and six bits follow: vector v, the columns 4 v to 4 v + 3, has
// its fifth bit as bit v of line 4, or its two upper bits as bits 2 (v % 4) of line 4 + v / 4. Codes of
// eight bits fill eight lines, a vector each. Numbers, sixteen of each: the scales of the unit's
// groups, then, if has_bias, the biases; in two levels both first levels, then the bytes in that order.
//
// Dense: a tile is K runs of sixteen values.
struct Matrix {
  enum class Kind : int { quantized, f32, f16, bf16 } kind;
  int n, k;
  int bits = 0, zero = 0, group = 0;
  bool has_bias = false;
  Numbers numbers = Numbers::f16;
  const uint8_t* data = nullptr;

  bool quantized() const { return kind == Kind::quantized; }
  int tiles() const { return (n + LANES - 1) / LANES; }
  size_t tile_bytes() const {
    if (quantized()) return unit_bytes() * size_t(k / unit_columns());
    return size_t(k) * (kind == Kind::f32 ? 64 : 32);
  }

  int unit_columns() const {
    return numbers == Numbers::two_level ? SUPER : group < GROUP ? GROUP : group;
  }
  int unit_groups() const { return unit_columns() / group; }
  static constexpr int code_bytes(int bits) { return 64 * bits; }  // of a block
  size_t codes_bytes() const {                                     // of a unit
    return size_t(code_bytes(bits)) * size_t(unit_columns() / GROUP);
  }
  size_t unit_bytes() const {
    const size_t kinds = has_bias ? 2 : 1, groups = size_t(unit_groups());
    // Whole lines in two levels: loads of codes that cross lines cost more than half a line in 53.
    if (numbers == Numbers::two_level) return (codes_bytes() + kinds * (32 + LANES * groups) + 63) / 64 * 64;
    return codes_bytes() + kinds * groups * (numbers == Numbers::f32 ? 64 : 32);
  }
};

// One code of a block.
inline int get_code(const uint8_t* block, int bits, int lane, int column) {
  const int vector = column / 4, at = 4 * lane + column % 4;
  if (bits == 8) return block[64 * vector + at];
  const int lower = block[64 * (vector % 4) + at] >> (vector < 4 ? 0 : 4) & 15;
  if (bits == 5) return lower | (block[256 + at] >> vector & 1) << 4;
  if (bits == 6) return lower | (block[256 + 64 * (vector / 4) + at] >> 2 * (vector % 4) & 3) << 4;
  return lower;
}
