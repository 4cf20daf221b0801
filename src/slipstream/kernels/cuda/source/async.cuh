// Copies that run ahead of the arithmetic, and waiting for what other blocks and kernels did.
//
// From sm_90 on weights arrive by bulk copy, one instruction of one lane; before that each lane of the
// copying warp copies 16 bytes at a time. Either way they complete on a barrier in shared memory.
#pragma once

#include "types.cuh"

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Return once all kernels that the stream ran before have finished and their writes can be seen.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the stream's next kernel start, if it was launched to overlap; its wait still covers us.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Copy 16 bytes; zeros where `valid` is false.
__device__ __forceinline__ void copy_16(void* to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// Copy 16 or 8 bytes; zeros where `valid` is false.
template <int bytes>
__device__ __forceinline__ void copy_run(void* to, const void* from, bool valid) {
  if constexpr (bytes == 16) {
    copy_16(to, from, valid);
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                 "l"(from), "n"(bytes), "r"(valid ? bytes : 0)
                 : "memory");
  }
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until all but the latest `pending` groups of this thread have arrived.
template <int pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Barriers in shared memory that count arrivals; a wait names the parity of the phase it waits for.
__device__ __forceinline__ void init_barrier(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                   shared_address(barrier))
               : "memory");
}

// Arrive, and have the phase wait for so many bytes besides.
__device__ __forceinline__ void expect_bytes(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait_barrier(const u64* barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
#define SLIPSTREAM_POLL "mbarrier.try_wait.parity.shared.b64"
#else
#define SLIPSTREAM_POLL "mbarrier.test_wait.parity.shared.b64"
#endif
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN: " SLIPSTREAM_POLL " done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Order reads of shared memory that this thread knows of before copies that overwrite it. Waiting on a
// barrier is not enough: copies go another way, and from L2 they were seen to overtake reads.
__device__ __forceinline__ void order_before_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Make barriers known to the copy engine and the rest of the cluster; a block barrier must follow.
__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
constexpr int COPY_ARRIVALS = 1;
#else
constexpr int COPY_ARRIVALS = 32;
#endif

// Copies by one warp that complete on a barrier of COPY_ARRIVALS arrivals.
struct Copier {
  int lane;
  u64 policy = 0;

  // `once`: nobody will read the same bytes again soon, so they need not displace others in L2.
  __device__ __forceinline__ Copier(int lane, bool once) : lane(lane) {
#if __CUDA_ARCH__ >= 900
    if (once) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
#endif
  }

  // Copy a multiple of 16 bytes to shared memory; the whole warp calls it.
  __device__ __forceinline__ void copy(char* to, const char* from, int bytes, u64* barrier) const {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      const u32 at = shared_address(barrier);
      expect_bytes(barrier, bytes);
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
          "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
          "l"(from), "r"(bytes), "r"(at), "l"(policy)
          : "memory");
    }
    __syncwarp();
#else
    for (int at = lane * 16; at < bytes; at += 512) copy_16(to + at, from + at);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
                 : "memory");
#endif
  }
};

// Meet all blocks of the cluster in two steps; barriers published before the first may then be used.
__device__ __forceinline__ void come_to_cluster() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();  // the instruction takes whole warps
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_cluster() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The address of the same place in block `rank` of the cluster.
__device__ __forceinline__ u32 in_cluster(const void* pointer, int rank) {
  u32 remote = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote)
      : "r"(shared_address(pointer)), "r"(rank));
#endif
  return remote;
}

__device__ __forceinline__ void arrive_in_cluster(u32 barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Meet all blocks of the cluster; their shared memory writes can then be seen.
__device__ __forceinline__ void meet_cluster() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();  // the instruction takes whole warps
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :::
                   "memory");
#endif
}

// Read a float of shared memory at the same place in block `rank` of the cluster.
__device__ __forceinline__ float read_cluster(const float* pointer, int rank) {
  float value = 0;
#if __CUDA_ARCH__ >= 900
  const u32 remote = in_cluster(pointer, rank);
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
#endif
  return value;
}
