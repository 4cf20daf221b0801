// Picks tokens of sampled rows, to the last bit as engine/sampling defines it: the argmax of
// (l - largest) / T + Gumbel noise over what the filters keep, the lowest id among equals.
//
// Every operation is a single rounded float32 operation (no fused products), sums of weights are
// whole numbers, and blocks of a row meet in a largest value, so nothing has an order.
#include "step.cuh"

// What a row is picked by; kernels/cuda/sampling.py writes it.
struct Pick {
    float temperature, min_weight;  // 0 keeps the argmax; a kept token weighs at least min_weight
    unsigned seed_low, seed_high, choice, position;
    float weight_scale;  // 2**bits of engine/sampling/reference.py
    int unused;
};

__device__ __forceinline__ unsigned ordered_bits(float x) {
    if (x != x) return 0;
    if (x == 0.0f) x = 0.0f;  // -0 equals 0
    const unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

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

// The natural logarithm of normal positive floats, as _log.
__device__ __forceinline__ float log_unfused(float a) {
    const int offset = __float_as_int(a) - 0x3F333333;
    const float n = (float)(offset >> 23);
    const float m = __int_as_float((offset & 0x7FFFFF) + 0x3F333333);
    const float f = __fsub_rn(m, 1.0f);
    const float s = __fdiv_rn(f, __fadd_rn(f, 2.0f));
    const float z = __fmul_rn(s, s);
    float p = 1.0f / 9.0f;
    p = __fadd_rn(__fmul_rn(p, z), 1.0f / 7.0f);
    p = __fadd_rn(__fmul_rn(p, z), 1.0f / 5.0f);
    p = __fadd_rn(__fmul_rn(p, z), 1.0f / 3.0f);
    const float twice = __fadd_rn(s, s);
    const float small =
        __fsub_rn(__fmul_rn(__fmul_rn(twice, z), p), __fmul_rn(n, 2.12194440e-4f));
    return __fadd_rn(__fmul_rn(n, 0.693359375f), __fadd_rn(twice, small));
}

__device__ __forceinline__ float gumbel(unsigned bits) {
    const float most = 1.0f - 1.0f / 16777216.0f;
    float w = __fmul_rn(__fadd_rn(__uint2float_rn(bits), 0.5f), 1.0f / 4294967296.0f);
    w = fminf(w, most);
    const float rest = __fsub_rn(1.0f, w);
    float e = w;
    if (rest != 1.0f) {
        const float lost = __fsub_rn(1.0f, rest);
        e = __fmul_rn(-log_unfused(rest), __fdiv_rn(w, lost));
    }
    return -log_unfused(e);
}

// Philox4x32 with ten rounds.
__device__ __forceinline__ uint4 philox(uint4 c, unsigned k0, unsigned k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned a_high = __umulhi(0xD2511F53u, c.x), a_low = 0xD2511F53u * c.x;
        const unsigned b_high = __umulhi(0xCD9E8D57u, c.z), b_low = 0xCD9E8D57u * c.z;
        c = make_uint4(b_high ^ c.y ^ k0, b_low, a_high ^ c.w ^ k1, a_low);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
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
