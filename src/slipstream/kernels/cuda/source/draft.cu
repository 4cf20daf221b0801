// What an assistant's draft does besides the kernels of a step: find the clusters of its vocabulary that
// it may pick from, and pick the token that the next draft step begins with.
//
// `positions` are those of the last token before the anchors, up to which attention sees; -1 is
// padding. In draft step `step`, from 0, a row stands at positions + 1 + step.
#include "noise.cuh"
#include "step.cuh"

// How a row's tokens are picked; kernels/cuda/draft.py writes it.
struct Draw {
    float temperature;  // 0 takes the largest logit
    unsigned seed_low, seed_high, choice;
};

// Mark the `top` clusters with the largest scores of each row, the first of equals before the others: one
// is among them if fewer than `top` come before it. A warp has one cluster. Grid (blocks of clusters,
// rows).
extern "C" __global__ void mark_clusters(const float* scores, int* marks, int clusters, int top) {
    wait_for_inputs();
    const float* row = scores + (size_t)blockIdx.y * clusters;
    const int own = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (own >= clusters) return;
    const unsigned key = ordered_bits(row[own]);
    unsigned before = 0;
#pragma unroll 8
    for (int i = lane; i < clusters; i += 32) {
        const unsigned other = ordered_bits(row[i]);
        before += other > key || (other == key && i < own);
    }
    before = __reduce_add_sync(0xffffffffu, before);
    if (lane == 0) marks[(size_t)blockIdx.y * clusters + own] = before < (unsigned)top;
}

// The first of the largest scores of each row, by way of `ids` to the target's token. Grid (blocks of a
// row, rows). `found` and `arrivals` have a zero for every row, zero again at the end. `drafted` is host
// memory, `tokens` what the next draft step embeds.
//   members: each token's cluster, of which only marked ones count; null where nothing is clustered.
extern "C" __global__ void pick_drafts(const float* logits, const Draw* draws, const int* positions,
                                       const int* ids, const int* members, const int* marks,
                                       int clusters, int* tokens, int* drafted,
                                       unsigned long long* found, unsigned* arrivals, int width,
                                       int step) {
    __shared__ bool is_last;
    wait_for_inputs();
    const int r = blockIdx.y;
    const Draw draw = draws[r];
    const unsigned position = (unsigned)(positions[r] + 2 + step);
    const float* row = logits + (size_t)r * width;
    const int* marked = marks + (size_t)r * clusters;
    unsigned long long best = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < width; i += gridDim.x * blockDim.x) {
        if (members != nullptr && !marked[members[i]]) continue;
        float score = row[i];
        if (draw.temperature > 0.0f) {
            const unsigned id = (unsigned)ids[i];
            const uint4 words = philox(make_uint4(id / 4, position, draw.choice, 0), draw.seed_low,
                                       draw.seed_high);
            const unsigned low = id & 1 ? words.y : words.x, high = id & 1 ? words.w : words.z;
            score = __fadd_rn(__fdiv_rn(score, draw.temperature), gumbel(id & 2 ? high : low));
        }
        const unsigned long long key =
            (unsigned long long)ordered_bits(score) << 32 | (0xffffffffu - (unsigned)i);
        best = key > best ? key : best;
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
    best = atomicExch(found + r, 0ull);
    // Clusters without a token leave nothing to pick from: any token is as good then.
    tokens[r] = drafted[r] = ids[best ? 0xffffffffu - (unsigned)best : 0u];
    arrivals[r] = 0;
}
