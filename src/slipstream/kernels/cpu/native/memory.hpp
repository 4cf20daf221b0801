// Page-aligned memory for weights and KV, zero until written and resident only where touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) : bytes_(bytes) {
    if (!bytes) return;
#if defined(__linux__)
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(p);
#else
    data_ = static_cast<uint8_t*>(std::calloc(1, bytes + 64));
    if (!data_) throw std::bad_alloc();
#endif
  }
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (!data_) return;
#if defined(__linux__)
    munmap(data_, bytes_);
#else
    std::free(data_);
#endif
  }

  // Back the memory with large pages where the system offers them: a prefetcher stops at a page's
  // end, and 24,000 small pages of weights do not fit the address cache.
  void prefer_large_pages() {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (data_) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
  }

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  void swap(Memory& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};
