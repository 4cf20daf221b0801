// The first of the largest logits of each row. Blocks of a row share it out; the last one to
// finish compares what they found, so the result does not depend on who that is.
#include "step.cuh"

// Larger float, NaN above all, then the lower index: numpy's argmax. An ordered key turns this into
// the comparison of whole numbers.
__device__ __forceinline__ unsigned long long ordered(float x, int index) {
    const unsigned bits = __float_as_uint(x);
    unsigned key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    if (x != x) key = 0xffffffffu;
    if (x == 0.0f) key = 0x80000000u;  // -0 equals 0
    return (unsigned long long)key << 32 | (0xffffffffu - (unsigned)index);
}

__device__ __forceinline__ unsigned long long block_max(unsigned long long best) {
    __shared__ unsigned long long shared[32];
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        const unsigned long long other = __shfl_xor_sync(0xffffffffu, best, offset);
        best = other > best ? other : best;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x / 32; i++) best = shared[i] > best ? shared[i] : best;
    return best;
}

// Grid (blocks of a row, rows). `found` has a place for every block, `arrivals` one zero for every row,
// which is zero again at the end. `out` may be host memory.
extern "C" __global__ void argmax(const float* logits, int* out, unsigned long long* found,
                                  unsigned* arrivals, int vocab) {
    __shared__ bool is_last;
    wait_for_inputs();
    const float* row = logits + (size_t)blockIdx.y * vocab;
    const int stride = gridDim.x * blockDim.x;
    unsigned long long best = 0;
    const auto take = [&](float x, int i) {
        const unsigned long long key = ordered(x, i);
        best = key > best ? key : best;
    };
    if (vocab % 4 == 0) {
#pragma unroll 4
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab / 4; i += stride) {
            const float4 v = ((const float4*)row)[i];
            take(v.x, 4 * i), take(v.y, 4 * i + 1), take(v.z, 4 * i + 2), take(v.w, 4 * i + 3);
        }
    } else {
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += stride) take(row[i], i);
    }
    best = block_max(best);
    if (threadIdx.x == 0) {
        found[blockIdx.y * gridDim.x + blockIdx.x] = best;
        __threadfence();
        is_last = atomicAdd(arrivals + blockIdx.y, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    best = 0;
    for (int i = threadIdx.x; i < (int)gridDim.x; i += blockDim.x) {
        const unsigned long long key = __ldcg(found + blockIdx.y * gridDim.x + i);
        best = key > best ? key : best;
    }
    best = block_max(best);
    if (threadIdx.x == 0) {
        out[blockIdx.y] = (int)(0xffffffffu - (unsigned)best);
        arrivals[blockIdx.y] = 0;
    }
}
