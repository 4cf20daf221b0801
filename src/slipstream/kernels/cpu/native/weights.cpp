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

void Weight::add(Matrix matrix, uint8_t* data) {
  matrix.data = data;
  n += matrix.n;
  k = matrix.k;
  tiles += matrix.tiles();
  (matrix.quantized() ? any_quantized : any_dense) = true;
  parts.push_back(matrix);
}

void Weight::add_quantized(int bits, int zero, int rows, int columns, const uint8_t* codes,
                           const uint16_t* scale, const uint16_t* bias) {
  int shift = -1;
  while (zero >> (shift + 1)) ++shift;
  Matrix m{bits == 4 ? Format::q4 : Format::q8, bias != nullptr, shift, rows, columns, nullptr};
  uint8_t* const data = arena->take(m.tile_bytes() * size_t(m.tiles()));
  const int groups = columns / GROUP, code_bytes = bits == 4 ? 256 : 512;
  uint8_t* p = data;
  for (int tile = 0; tile < m.tiles(); ++tile) {
    for (int g = 0; g < groups; ++g, p += m.block_bytes()) {
      uint16_t* scales = reinterpret_cast<uint16_t*>(p + code_bytes);
      for (int lane = 0; lane < LANES; ++lane) {
        const int row = tile * LANES + lane;
        if (row >= rows) continue;  // fresh memory is zero: scale 0 gives 0
        const uint8_t* from = codes + size_t(row) * columns + size_t(g) * GROUP;
        for (int i = 0; i < code_bytes / 64; ++i)
          for (int j = 0; j < 4; ++j) {
            const uint8_t low = from[4 * i + j];
            p[64 * i + 4 * lane + j] = bits == 4 ? uint8_t(low | from[16 + 4 * i + j] << 4) : low;
          }
        scales[lane] = scale[size_t(row) * groups + g];
        if (bias) scales[LANES + lane] = bias[size_t(row) * groups + g];
      }
    }
  }
  add(m, data);
}

void Weight::add_dense(Format format, int rows, int columns, const void* values) {
  Matrix m{format, false, -1, rows, columns, nullptr};
  uint8_t* const data = arena->take(m.tile_bytes() * size_t(m.tiles()));
  const size_t width = format == Format::f32 ? 4 : 2;
  const uint8_t* from = static_cast<const uint8_t*>(values);
  for (int row = 0; row < rows; ++row) {
    uint8_t* tile = data + size_t(row / LANES) * m.tile_bytes() + size_t(row % LANES) * width;
    for (int c = 0; c < columns; ++c, from += width)
      std::memcpy(tile + size_t(c) * m.block_bytes(), from, width);
  }
  add(m, data);
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
