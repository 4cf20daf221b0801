// Copies that run ahead of the arithmetic, and waiting for what other blocks and kernels did.
//
// From sm_90 on a warp's weights arrive by bulk copy, one instruction of one lane, and complete on an
// mbarrier. Before that each lane copies 16 bytes at a time (cp.async) and waits for its groups.
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

// Fetch what will be read soon from memory to L2.
__device__ __forceinline__ void prefetch_to_l2(const char* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// A warp's own ring of `stages` buffers of `bytes`, filled in order and read in order.
template <int stages, int bytes>
struct Ring {
  char* buffers;
  u64* barriers;
  int lane;
  u64 policy;
  int filling = 0;
  int reading = 0;
  u32 parity = 0;

  static constexpr int shared_bytes = stages * bytes;

  // `once`: nobody will read the same bytes again soon, so they need not displace others in L2.
  __device__ __forceinline__ Ring(char* buffers, u64* barriers, int lane, bool once)
      : buffers(buffers), barriers(barriers), lane(lane), policy(0) {
#if __CUDA_ARCH__ >= 900
    if (once) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    if (lane == 0) {
      for (int stage = 0; stage < stages; ++stage) init_barrier(barriers + stage, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
#endif
  }

  // Start filling the next buffer if `valid`; all lanes call it.
  __device__ __forceinline__ void fill(const char* from, bool valid) {
    char* to = buffers + filling * bytes;
#if __CUDA_ARCH__ >= 900
    if (valid && lane == 0) {
      const u32 barrier = shared_address(barriers + filling);
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
          "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
          "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
          : "memory");
    }
#else
    if (valid)
      for (int at = lane * 16; at < bytes; at += 512) copy_16(to + at, from + at);
    commit_copies();
#endif
    filling = filling + 1 == stages ? 0 : filling + 1;
  }

  // Wait for the oldest filled buffer and return it; valid until the next `release`.
  __device__ __forceinline__ const char* wait() {
#if __CUDA_ARCH__ >= 900
    wait_barrier(barriers + reading, parity);
#else
    wait_copies<stages - 1>();
    __syncwarp();
#endif
    return buffers + reading * bytes;
  }

  // Give the buffer back; the warp has read all it wanted.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (++reading == stages) {
      reading = 0;
      parity ^= 1;
    }
  }
};

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
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote)
      : "r"(shared_address(pointer)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
#endif
  return value;
}
