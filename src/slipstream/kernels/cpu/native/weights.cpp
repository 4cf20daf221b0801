#include "weights.hpp"

#include <algorithm>

namespace {
constexpr size_t CHUNK = size_t(16) << 20;      // most that a model's last chunk can waste
constexpr size_t READ_AHEAD = size_t(16) << 10;  // kernels prefetch past a matrix's end
}  // namespace

uint8_t* Arena::take(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > left_) {
    chunks_.emplace_back(std::max(bytes, CHUNK) + READ_AHEAD);
    chunks_.back().prefer_large_pages();
    left_ = chunks_.back().bytes() - READ_AHEAD;
  }
  const Memory& chunk = chunks_.back();
  uint8_t* out = chunk.data() + (chunk.bytes() - READ_AHEAD - left_);
  left_ -= bytes;
  used_ += bytes;
  return out;
}

void Weight::begin(Matrix shape) {
  shape.data = filling = arena->take(shape.tile_bytes() * size_t(shape.tiles()));
  n += shape.n;
  k = shape.k;
  tiles += shape.tiles();
  (shape.quantized() ? any_quantized : any_dense) = true;
  parts.push_back(shape);
}

namespace {

// The codes of one row of one block, sixteen rows side by side.
void pack_codes(const uint8_t* codes, int bits, int lane, uint8_t* block) {
  uint32_t vector[8], upper[2] = {};
  std::memcpy(vector, codes, GROUP);
  const auto put = [&](int line, uint32_t word) {
    std::memcpy(block + 64 * line + 4 * lane, &word, 4);
  };
  for (int v = 0; v < 8 && bits == 8; ++v) put(v, vector[v]);
  if (bits == 8) return;
  for (int v = 0; v < 8; ++v) {
    if (v < 4) put(v, (vector[v] & 0x0f0f0f0fu) | (vector[v + 4] & 0x0f0f0f0fu) << 4);
    if (bits == 5) upper[0] |= (vector[v] >> 4 & 0x01010101u) << v;
    if (bits == 6) upper[v / 4] |= (vector[v] >> 4 & 0x03030303u) << 2 * (v % 4);
  }
  for (int line = 4; line < bits; ++line) put(line, upper[line - 4]);
}

// The numbers of one row of one unit; `from` the row's own. A first level or a single one, then bytes.
void pack_numbers(const Matrix& m, const GroupNumbers& from, int row, int unit, int lane, int which,
                  uint8_t* at) {
  const size_t width = m.numbers == Numbers::f32 ? 4 : 2, groups = size_t(m.unit_groups());
  const size_t units = size_t(m.k / m.unit_columns()), first = size_t(row) * units + size_t(unit);
  const uint8_t* const values = static_cast<const uint8_t*>(from.values);
  const size_t levels = m.numbers == Numbers::two_level ? 1 : groups;
  for (size_t g = 0; g < levels; ++g)
    std::memcpy(at + (size_t(which) * levels + g) * LANES * width + size_t(lane) * width,
                values + (first * levels + g) * width, width);
  if (m.numbers != Numbers::two_level) return;
  at += (m.has_bias ? 2 : 1) * LANES * width + size_t(which) * groups * LANES;
  for (size_t g = 0; g < groups; ++g) at[g * LANES + size_t(lane)] = from.small[first * groups + g];
}

}  // namespace

void Weight::fill_quantized(int first, int count, const uint8_t* codes, const GroupNumbers& scale,
                            const GroupNumbers& bias) {
  const Matrix m = parts.back();  // a copy: what is written here may not seem to change it
  const int columns = m.unit_columns(), units = m.k / columns;
  uint8_t* p = filling + size_t(first / LANES) * m.tile_bytes();
  for (int top = 0; top < count; top += LANES) {
    for (int unit = 0; unit < units; ++unit, p += m.unit_bytes()) {
      for (int lane = 0; lane < LANES; ++lane) {
        const int row = top + lane;
        if (row >= count) break;  // fresh memory is zero: scale 0 gives 0
        const uint8_t* const from = codes + size_t(row) * size_t(m.k) + size_t(unit) * columns;
        for (int b = 0; b < columns / GROUP; ++b)
          pack_codes(from + b * GROUP, m.bits, lane, p + b * Matrix::code_bytes(m.bits));
        pack_numbers(m, scale, row, unit, lane, 0, p + m.codes_bytes());
        if (m.has_bias) pack_numbers(m, bias, row, unit, lane, 1, p + m.codes_bytes());
      }
    }
  }
}

namespace {

// Lay rows of dense values out in tiles, from row `first` on.
template <class T>
void fill_tiles(const Matrix& m, uint8_t* data, int first, int count, const void* values) {
  const T* from = static_cast<const T*>(values);
  const size_t columns = size_t(m.k);
  for (int row = first; row < first + count; ++row, from += columns) {
    T* tile = reinterpret_cast<T*>(data + size_t(row / LANES) * m.tile_bytes()) + row % LANES;
    for (size_t c = 0; c < columns; ++c) tile[c * LANES] = from[c];
  }
}

}  // namespace

void Weight::fill_dense(int first, int count, const void* values) {
  const Matrix& m = parts.back();
  if (m.kind == Matrix::Kind::f32)
    fill_tiles<uint32_t>(m, filling, first, count, values);
  else
    fill_tiles<uint16_t>(m, filling, first, count, values);
}

KV::KV(std::vector<KVLayer> given, int num_pages) : layers(std::move(given)) {
  for (size_t i = 0; i < layers.size(); ++i) {
    offsets.push_back(page_stride);
    if (size_t(layers[i].owner) == i) page_stride += 2 * layers[i].plane();
  }
  pages = Memory(size_t(num_pages) * page_stride * sizeof(uint16_t));
  pages.prefer_large_pages();
}

KVView KV::view(int layer) const {
  const KVLayer& one = layers[size_t(layer)];
  uint16_t* const k = reinterpret_cast<uint16_t*>(pages.data()) + offsets[size_t(one.owner)];
  KVView view;
  static_cast<Attention&>(view) = one.attention;
  view.k = k;
  view.v = k + one.plane();
  view.page_stride = page_stride;
  return view;
}

void KV::zero(int page) {
  const size_t bytes = page_stride * sizeof(uint16_t);
  std::memset(pages.data() + size_t(page) * bytes, 0, bytes);
}
