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

// The scales or biases of a canonical matrix: (n, k / group) numbers, or (n, k / 256) and a byte for each
// group.
struct GroupNumbers {
  const void* values = nullptr;
  const uint8_t* small = nullptr;
};

// One or several matrices of equal K whose outputs lie side by side.
struct Weight {
  std::shared_ptr<Arena> arena;
  std::vector<Matrix> parts;
  int n = 0, k = 0, tiles = 0;
  bool any_quantized = false, any_dense = false;
  uint8_t* filling = nullptr;  // the last part's data

  // Add a part of that shape, zero as yet, whose rows the next calls fill.
  void begin(Matrix shape);
  // Pack `count` rows of the last part from row `first` on, a multiple of LANES. The values are those of
  // these rows alone.
  void fill_quantized(int first, int count, const uint8_t* codes, const GroupNumbers& scale,
                      const GroupNumbers& bias);
  void fill_dense(int first, int count, const void* values);
};

// One layer: its attention and whose pages it attends to.
struct KVLayer {
  Attention attention;
  int owner;

  size_t plane() const {  // halves of K or V of a page
    return size_t(attention.kv_heads) * size_t(attention.head_dim) * LANES;
  }
};

// K and V pages of every layer that owns some. A page holds all of them, K then V: a short context is
// one stretch of memory, so that it costs what it uses, in few large pages of the system.
struct KV {
  KV(std::vector<KVLayer> layers, int num_pages);
  KVView view(int layer) const;
  size_t plane(int layer) const { return layers[size_t(layer)].plane(); }
  void zero(int page);

  std::vector<KVLayer> layers;
  std::vector<size_t> offsets;  // halves from a page's beginning to an owner's K
  size_t page_stride = 0;       // halves of a page
  Memory pages;
};
