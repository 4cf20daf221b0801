// Picks tokens of sampled rows, to the last bit as engine/sampling defines it: the argmax of
// (l - largest) / T + Gumbel noise over what the filters keep, the lowest id among equals.
//
// Every operation is a single rounded float32 operation (no fused products), sums of weights are
// whole numbers, and blocks of a row meet in a largest value, so nothing has an order.
#include "noise.cuh"
#include "step.cuh"

// What a row is picked by; kernels/cuda/sampling.py writes it.
struct Pick {
    float temperature, min_weight;  // 0 keeps the argmax; a kept token weighs at least min_weight
    unsigned seed_low, seed_high, choice, position;
    float weight_scale;  // 2**bits of engine/sampling/reference.py
    int unused;
};

__device__ __forceinline__ float from_ordered(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// exp(x) for x <= 0, as exp_unfused.
__device__ __forceinline__ float exp_unfused(float x) {
    const float clamped = fmaxf(x, -60.0f);
    const float n = rintf(__fmul_rn(clamped, 1.44269504f));
    float r = __fadd_rn(clamped, __fmul_rn(n, -0.693359375f));
    r = __fadd_rn(r, __fmul_rn(n, 2.12194440e-4f));
    float p = 1.0f / 720.0f;
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6.0f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    return __fmul_rn(p, __uint_as_float((unsigned)(127 + (int)n) << 23));
}

__device__ __forceinline__ float weigh(float x, float scale) {
    return rintf(__fmul_rn(exp_unfused(x), scale));
}

// The largest logit of each row as ordered bits, NaN left out. `largest` is zero before.
extern "C" __global__ void largest_logits(const float* logits, unsigned* largest, int vocab) {
    const float* row = logits + (size_t)blockIdx.y * vocab;
    unsigned best = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += gridDim.x * blockDim.x)
        best = max(best, ordered_bits(row[i]));
    best = __reduce_max_sync(0xffffffffu, best);
    if (threadIdx.x % 32 == 0) atomicMax(largest + blockIdx.y, best);
}

// Weights of one row's tokens, whole numbers.
extern "C" __global__ void weigh_row(const float* logits, const unsigned* largest, const Pick* picks,
                                     long long* weights, int vocab, int row) {
    const Pick pick = picks[row];
    const float top = from_ordered(largest[row]);
    const float* from = logits + (size_t)row * vocab;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += gridDim.x * blockDim.x) {
        const float l = from[i];
        const float x = __fdiv_rn(__fsub_rn(l, top), pick.temperature);
        weights[i] = l == l ? (long long)weigh(x, pick.weight_scale) : 0;
    }
}

// Score and pick. A token is kept if it does not come behind the row's cut in the order (logit
// descending, id ascending). `found` is zero before and again at the end; `out` may be host memory.
extern "C" __global__ void pick_tokens(const float* logits, const unsigned* largest,
                                       const Pick* picks, const float* cut_values,
                                       const long long* cut_ids, unsigned long long* found,
                                       unsigned* arrivals, int* out, int vocab) {
    __shared__ bool is_last;
    const int r = blockIdx.y;
    const Pick pick = picks[r];
    if (pick.temperature == 0.0f) return;
    const float top = from_ordered(largest[r]), cut = cut_values[r];
    const long long cut_id = cut_ids[r];
    const float* row = logits + (size_t)r * vocab;
    unsigned long long best = 0;
    for (int block = blockIdx.x * blockDim.x + threadIdx.x; block * 4 < vocab;
         block += gridDim.x * blockDim.x) {
        const uint4 words = philox(make_uint4(block, pick.position, pick.choice, 0),
                                   pick.seed_low, pick.seed_high);
        const unsigned bits[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const int id = block * 4 + u;
            const float l = id < vocab ? row[id] : minus_infinity();
            if (!(l > minus_infinity()) || l < cut || (l == cut && id > cut_id)) continue;
            const float x = __fdiv_rn(__fsub_rn(l, top), pick.temperature);
            if (pick.min_weight > 0.0f && weigh(x, pick.weight_scale) < pick.min_weight) continue;
            const unsigned long long key =
                (unsigned long long)ordered_bits(__fadd_rn(x, gumbel(bits[u]))) << 32 |
                (0xffffffffu - (unsigned)id);
            best = key > best ? key : best;
        }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        const unsigned long long other = __shfl_xor_sync(0xffffffffu, best, offset);
        best = other > best ? other : best;
    }
    if (threadIdx.x % 32 == 0) atomicMax(found + r, best);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(arrivals + r, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last || threadIdx.x != 0) return;
    __threadfence();
    const bool is_finite = top == top && fabsf(top) < __int_as_float(0x7f800000);
    best = atomicExch(found + r, 0ull);
    out[r] = is_finite ? (int)(0xffffffffu - (unsigned)best) : -1;
    arrivals[r] = 0;
}
