// A small thread team that runs one function on every member and meets at barriers.
//
// Members spin only briefly, then give their core away (yield) or park on a condition variable, so
// an idle engine costs nothing and a team larger than the machine still moves.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
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

  // Run fn(context, member) for member 0 (the caller) to active - 1; returns when all are done.
  // A forked child has no threads of the team: there the caller runs alone.
  void run(void (*fn)(void*, int), void* context, int active);

  // Members of the function that runs.
  int active() const { return active_; }

  // Whether members waited so long in the last run, all waits together, that one must have lost its
  // core; a run that had to wake parked members may wait as long again.
  bool stalled() const;

  // Every active member must arrive before any goes on.
  void barrier() {
    if (active_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == active_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; spins < 4000; ++spins) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      relax();
    }
    wait_long(phase);
  }

 private:
  void work(int member);
  void stop();
  void wait_long(unsigned phase);

  const int size_;
  const long owner_;  // process that has the threads
  int active_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  // What to do next: a count in the upper bits, the number of active members in the lower ten.
  alignas(64) std::atomic<uint64_t> job_{0};
  std::atomic<int64_t> waited_ns_{0};  // beyond spinning, in this run
  bool woke_ = false;
  std::atomic<int> parked_{0};
  std::atomic<bool> stop_{false};
  void (*fn_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};
