#include "pool.hpp"

#include <chrono>

#if defined(_WIN32)
#include <process.h>
#define getpid _getpid
#else
#include <unistd.h>
#endif

namespace {
using Clock = std::chrono::steady_clock;

// A worker waits this long for the next step before it parks: longer than what the host does
// between two steps of a sampled reply (110 to 250 us), far shorter than anybody would notice as load.
constexpr auto SPIN = std::chrono::microseconds(400);
// Waits beyond spinning, of one step and all members: no balanced step of a few rows comes near; a
// lost time slice does, and so do two members on one core, a little at each barrier. At 500 us the
// leavings of a peer that had just stopped were taken for it, and steps took 1.6 times as long.
constexpr auto STALL = std::chrono::microseconds(2000);
constexpr uint64_t ACTIVE_BITS = 10;
constexpr uint64_t ACTIVE_MASK = (uint64_t(1) << ACTIVE_BITS) - 1;
}  // namespace

Team::Team(int size) : size_(size), owner_(long(getpid())) {
  try {
    for (int member = 1; member < size; ++member)
      threads_.emplace_back([this, member] { work(member); });
  } catch (...) {  // the system grants no more threads: end those that started
    stop();
    throw;
  }
}

Team::~Team() { stop(); }

void Team::stop() {
  if (long(getpid()) != owner_) {  // nothing to join in a forked child
    new std::vector<std::thread>(std::move(threads_));
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
    job_.fetch_add(uint64_t(1) << ACTIVE_BITS);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(void (*fn)(void*, int), void* context, int active) {
  waited_ns_.store(0, std::memory_order_relaxed);
  if (long(getpid()) != owner_) active = 1;
  active_ = active;
  if (active == 1) return fn(context, 0);
  fn_ = fn;
  context_ = context;
  // Sequentially consistent, as is parked_: a worker about to park and this caller cannot both
  // miss each other. Count and size travel in one word, so that a worker who was left out of
  // earlier runs never takes one run's size for another's.
  job_.store(((job_.load() >> ACTIVE_BITS) + 1) << ACTIVE_BITS | uint64_t(active));
  woke_ = parked_.load() > 0;
  if (woke_) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  fn(context, 0);
  barrier();
}

bool Team::stalled() const {
  const std::chrono::nanoseconds waited(waited_ns_.load(std::memory_order_relaxed));
  return waited > (woke_ ? 2 * STALL : STALL);
}

void Team::wait_long(unsigned phase) {
  const auto start = Clock::now();
  while (phase_.load(std::memory_order_acquire) == phase) std::this_thread::yield();
  const std::chrono::nanoseconds waited = Clock::now() - start;
  waited_ns_.fetch_add(waited.count(), std::memory_order_relaxed);
}

void Team::work(int member) {
  uint64_t seen = 0;
  for (;;) {
    const auto start = Clock::now();
    for (int spins = 0; job_.load(std::memory_order_acquire) == seen; ++spins) {
      relax();
      if (spins % 64 == 63 && Clock::now() - start > SPIN) {
        std::unique_lock<std::mutex> lock(mutex_);
        parked_.fetch_add(1);
        wake_.wait(lock, [&] { return job_.load() != seen; });
        parked_.fetch_sub(1);
      }
    }
    seen = job_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    if (uint64_t(member) >= (seen & ACTIVE_MASK)) continue;
    fn_(context_, member);
    barrier();
  }
}
