// Packed weights and KV pages of the CPU back end: who owns the bytes.
#pragma once

#include <memory>
#include <vector>

#include "kernels.hpp"
#include "memory.hpp"

// Hands out memory in order of use, so that a step reads its weights front to back.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint8_t* take(size_t bytes);
  size_t used() const { return used_; }

 private:
  std::vector<Memory> chunks_;
  size_t left_ = 0, used_ = 0;
};

// One or several matrices of equal K whose outputs lie side by side.
struct Weight {
  std::shared_ptr<Arena> arena;
  std::vector<Matrix> parts;
  int n = 0, k = 0, tiles = 0;
  bool any_quantized = false, any_dense = false;

  // Pack codes (n, k) with scales and biases (n, k / 32); bias may be null.
  void add_quantized(int bits, int zero, int rows, int columns, const uint8_t* codes,
                     const uint16_t* scale, const uint16_t* bias);
  void add_dense(Format format, int rows, int columns, const void* values);

 private:
  void add(Matrix matrix, uint8_t* data);
};

// K and V pages of every layer. A page holds all layers, K then V: a short context is one stretch
// of memory, so that it costs what it uses, in few large pages of the system.
struct KV {
  KV(int layers, int num_pages, int heads, int kv_heads, int head_dim, bool interleaved,
     const float* cos, const float* sin);
  size_t plane() const { return size_t(kv_heads) * size_t(head_dim) * LANES; }  // halves of K or V
  KVView view(int layer) const;
  void zero(int page);

  int layers, num_pages, heads, kv_heads, head_dim;
  bool interleaved;
  const float* cos;
  const float* sin;
  Memory pages;  // [page][layer][k, v]
};
