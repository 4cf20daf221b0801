#include "pool.hpp"

#include <chrono>

namespace {
// A worker waits this long for the next step before it parks: longer than the Python between two
// steps of a reply (30 to 60 us), far shorter than anybody would notice as load.
constexpr auto SPIN = std::chrono::microseconds(200);
}  // namespace

Team::Team(int size) : size_(size) {
  for (int member = 1; member < size; ++member)
    threads_.emplace_back([this, member] { work(member); });
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
    job_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(void (*fn)(void*, int), void* context) {
  if (size_ == 1) return fn(context, 0);
  fn_ = fn;
  context_ = context;
  job_.fetch_add(1);  // sequentially consistent, as is parked_: one side always sees the other
  if (parked_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  fn(context, 0);
  barrier();
}

void Team::work(int member) {
  unsigned seen = 0;
  for (;;) {
    const auto start = std::chrono::steady_clock::now();
    for (int spins = 0; job_.load(std::memory_order_acquire) == seen; ++spins) {
      relax();
      if (spins % 64 == 63 && std::chrono::steady_clock::now() - start > SPIN) {
        std::unique_lock<std::mutex> lock(mutex_);
        parked_.fetch_add(1);
        wake_.wait(lock, [&] { return job_.load() != seen; });
        parked_.fetch_sub(1);
      }
    }
    seen = job_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    fn_(context_, member);
    barrier();
  }
}
