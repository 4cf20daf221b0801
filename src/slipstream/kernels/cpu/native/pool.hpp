// A small thread team that runs one function on every member and meets at barriers.
//
// Members spin only briefly, then give their core away (yield) or park on a condition variable, so
// an idle engine costs nothing and a team larger than the machine still moves.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  explicit Team(int size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Run fn(context, member) for member 0 (the caller) to size - 1; returns when all are done.
  void run(void (*fn)(void*, int), void* context);

  // Every member of the running function must arrive before any goes on.
  void barrier() {
    if (size_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < 4000)
        relax();
      else
        std::this_thread::yield();
    }
  }

 private:
  void work(int member);

  const int size_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  alignas(64) std::atomic<unsigned> job_{0};
  std::atomic<int> parked_{0};
  std::atomic<bool> stop_{false};
  void (*fn_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};
