// The small kernels of a layer: norms, gated activations, rotation and the write of K and V. A row
// is one block or more of its own, so its bytes cannot depend on the rows beside it.
#include "step.cuh"

// x / sqrt(mean(x**2) + eps) * weight as bfloat16. The block's size depends on the width alone.
// `rows` picks the rows to take, null takes all. A thread keeps up to CACHED words of four columns.
#define CACHED 4

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(const float* x, const float* weight, bfloat16_bits* out, const int* rows, int width,
             float eps) {
    __shared__ float sums[32];
    const int count = width / 4, step = blockDim.x;
    float4 weights[CACHED];
#pragma unroll
    for (int u = 0; u < CACHED; u++) {
        const int i = threadIdx.x + u * step;
        if (i < count) weights[u] = ((const float4*)weight)[i];
    }
    wait_for_inputs();
    const int source = rows ? rows[blockIdx.x] : (int)blockIdx.x;
    const float4* in = (const float4*)(x + (size_t)source * width);
    float4 kept[CACHED];
    float sum = 0.0f;
    const auto add = [&](const float4& v) {
        sum = fmaf(v.x, v.x, sum);
        sum = fmaf(v.y, v.y, sum);
        sum = fmaf(v.z, v.z, sum);
        sum = fmaf(v.w, v.w, sum);
    };
#pragma unroll
    for (int u = 0; u < CACHED; u++) {
        const int i = threadIdx.x + u * step;
        if (i < count) kept[u] = in[i];
    }
#pragma unroll
    for (int u = 0; u < CACHED; u++)
        if (threadIdx.x + u * step < count) add(kept[u]);
    for (int i = threadIdx.x + CACHED * step; i < count; i += step) add(in[i]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    const float total = warp_sum(threadIdx.x % 32 < step / 32 ? sums[threadIdx.x % 32] : 0.0f);
    const float scale = 1.0f / sqrtf(total / (float)width + eps);
    uint2* to = (uint2*)(out + (size_t)blockIdx.x * width);
    const auto write = [&](int i, const float4& v, const float4& w) {
        to[i] = make_uint2(pack_bfloat16(v.x * scale * w.x, v.y * scale * w.y),
                           pack_bfloat16(v.z * scale * w.z, v.w * scale * w.w));
    };
#pragma unroll
    for (int u = 0; u < CACHED; u++) {
        const int i = threadIdx.x + u * step;
        if (i < count) write(i, kept[u], weights[u]);
    }
    for (int i = threadIdx.x + CACHED * step; i < count; i += step)
        write(i, in[i], ((const float4*)weight)[i]);
}

// Rows as bfloat16, picked like those of a norm.
extern "C" __global__ void round_rows(const float* x, bfloat16_bits* out, const int* rows,
                                      int width) {
    wait_for_inputs();
    const int source = rows ? rows[blockIdx.x] : (int)blockIdx.x;
    const float4* in = (const float4*)(x + (size_t)source * width);
    uint2* to = (uint2*)(out + (size_t)blockIdx.x * width);
    for (int i = threadIdx.x; i < width / 4; i += blockDim.x) {
        const float4 v = in[i];
        to[i] = make_uint2(pack_bfloat16(v.x, v.y), pack_bfloat16(v.z, v.w));
    }
}

// bfloat16 rows picked by `rows`.
extern "C" __global__ void pick_rows(const bfloat16_bits* x, bfloat16_bits* out, const int* rows,
                                     int width) {
    wait_for_inputs();
    const uint2* in = (const uint2*)(x + (size_t)rows[blockIdx.x] * width);
    uint2* to = (uint2*)(out + (size_t)blockIdx.x * width);
    for (int i = threadIdx.x; i < width / 4; i += blockDim.x) to[i] = in[i];
}

// (residual + x / sqrt(mean(x**2) + eps) * weight) * scale; `out` may be `residual`. A block a row, whose
// size depends on the width alone.
extern "C" __global__ void __launch_bounds__(1024)
    norm_add(const float* residual, const float* x, const float* weight, float* out, int width,
             float eps, float factor) {
    __shared__ float sums[32];
    wait_for_inputs();
    const int count = width / 4, step = blockDim.x;
    const float4* in = (const float4*)(x + (size_t)blockIdx.x * width);
    const float4* before = (const float4*)(residual + (size_t)blockIdx.x * width);
    float4* to = (float4*)(out + (size_t)blockIdx.x * width);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += step) {
        const float4 v = in[i];
        sum = fmaf(v.x, v.x, sum);
        sum = fmaf(v.y, v.y, sum);
        sum = fmaf(v.z, v.z, sum);
        sum = fmaf(v.w, v.w, sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    const float total = warp_sum(threadIdx.x % 32 < step / 32 ? sums[threadIdx.x % 32] : 0.0f);
    const float scale = 1.0f / sqrtf(total / (float)width + eps);
    for (int i = threadIdx.x; i < count; i += step) {
        const float4 v = in[i], w = ((const float4*)weight)[i], r = before[i];
        to[i] = make_float4(fmaf(v.x * scale, w.x, r.x) * factor,
                            fmaf(v.y * scale, w.y, r.y) * factor,
                            fmaf(v.z * scale, w.z, r.z) * factor,
                            fmaf(v.w * scale, w.w, r.w) * factor);
    }
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// 0.79788456 is sqrt(2 / pi).
__device__ __forceinline__ float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.79788456f * fmaf(0.044715f * x * x, x, x)));
}

// silu(gate) * up as bfloat16 for rows of gate, then up; gelu_tanh where `gelu`. Grid (column blocks,
// rows).
extern "C" __global__ void gated(const float* gate_up, bfloat16_bits* out, int width, int gelu) {
    let_next_start();
    wait_for_inputs();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i * 4 >= width) return;
    const float* row = gate_up + (size_t)blockIdx.y * 2 * width;
    const float4 gate = ((const float4*)row)[i];
    const float4 up = ((const float4*)(row + width))[i];
    const auto act = [&](float x) { return gelu ? gelu_tanh(x) : silu(x); };
    ((uint2*)(out + (size_t)blockIdx.y * width))[i] =
        make_uint2(pack_bfloat16(act(gate.x) * up.x, act(gate.y) * up.y),
                   pack_bfloat16(act(gate.z) * up.z, act(gate.w) * up.w));
}

// cap * tanh(logits / cap), in place. Grid (column blocks, rows).
extern "C" __global__ void cap_logits(float* logits, int width, float cap) {
    wait_for_inputs();
    float* row = logits + (size_t)blockIdx.y * width;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < width; i += gridDim.x * blockDim.x)
        row[i] = cap * tanhf(row[i] / cap);
}

// Places of a head's elements in its share of a page, laid out so that a lane of the attention
// kernel reads its operands as whole 16-byte words; see attention.cu.
__device__ __forceinline__ int key_place(int slot, int d) {
    const int lane = (2 * (slot / 4) + slot % 2) * 4 + d % 32 / 8;
    return ((d / 32 * 2 + slot % 4 / 2) * 32 + lane) * 8 + d % 8;
}

__device__ __forceinline__ int value_place(int slot, int d) {
    return (d / 16 * 32 + d % 8 * 4 + slot / 4) * 8 + d % 16 / 8 * 4 + slot % 4;
}

// Rotate q and k by the rows' positions; q goes to `q` as fp16, k and v to the pages. A thread has
// a pair of columns. Padding rows write nothing. Grid (pair blocks, rows).
//   qkv: rows of (heads + 2 kv_heads) * head_dim; q: rows of heads * padded_dim.
//   pages: this layer's pages, `page_stride` fp16 each.
//   inputs[0] is the stride of the page table.
extern "C" __global__ void rope_append(const float* qkv, half_bits* q, half_bits* pages,
                                       long long page_stride, const float* cosines,
                                       const float* sines, const int* inputs, const int* positions,
                                       const int* sequences, const int* page_table, int heads,
                                       int kv_heads, int head_dim, int padded_dim,
                                       int interleaved) {
    let_next_start();
    wait_for_inputs();
    const int row = blockIdx.y;
    const int position = positions[row];
    const int pairs = padded_dim / 2;
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int head = index / pairs, pair = index % pairs;
    if (position < 0 || head >= heads + 2 * kv_heads) return;
    const int half_dim = head_dim / 2;
    int a = 2 * pair, b = 2 * pair + 1;
    float x = 0.0f, y = 0.0f;
    if (pair < half_dim) {
        const bool is_value = head >= heads + kv_heads;
        if (!interleaved && !is_value) a = pair, b = pair + half_dim;
        const float* in =
            qkv + ((size_t)row * (heads + 2 * kv_heads) + head) * head_dim;
        x = in[a], y = in[b];
        if (!is_value) {
            const float c = cosines[(size_t)position * half_dim + pair];
            const float s = sines[(size_t)position * half_dim + pair];
            const float turned = __fmaf_rn(x, c, -__fmul_rn(y, s));
            y = __fmaf_rn(x, s, __fmul_rn(y, c));
            x = turned;
        }
    }
    if (head < heads) {
        half_bits* to = q + ((size_t)row * heads + head) * padded_dim;
        to[a] = to_half(x), to[b] = to_half(y);
        return;
    }
    const int page = page_table[(size_t)sequences[row] * inputs[0] + position / 16];
    half_bits* to = pages + page * page_stride + (size_t)(head - heads) * 16 * padded_dim;
    const int slot = position % 16;
    if (head < heads + kv_heads)
        to[key_place(slot, a)] = to_half(x), to[key_place(slot, b)] = to_half(y);
    else
        to[value_place(slot, a)] = to_half(x), to[value_place(slot, b)] = to_half(y);
}

// The same with norms, a warp for each head. A head of q or k is divided by the root of its mean square
// and weighted, then turned; one of v is divided where `v_norm`, and comes from k's columns where
// `k_is_v`. Without KV heads only q is made: `shift` is added to positions then. Grid (head blocks, rows).
//   q_weight, k_weight: of head_dim, null for no norm.
extern "C" __global__ void norm_rope(const float* qkv, half_bits* q, half_bits* pages,
                                     long long page_stride, const float* cosines,
                                     const float* sines, const int* inputs, const int* positions,
                                     const int* sequences, const int* page_table,
                                     const float* q_weight, const float* k_weight, float eps,
                                     int shift, int heads, int kv_heads, int head_dim,
                                     int padded_dim, int interleaved, int v_norm, int k_is_v) {
    constexpr int MOST = 8;  // pairs of a lane: heads have up to 512 columns
    let_next_start();
    wait_for_inputs();
    const int row = blockIdx.y, lane = threadIdx.x % 32;
    const int head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (positions[row] < 0 || head >= heads + 2 * kv_heads) return;
    const int position = positions[row] + shift;
    const bool is_query = head < heads, is_value = head >= heads + kv_heads;
    const int half_dim = head_dim / 2, pairs = padded_dim / 2;
    const int sources = heads + (k_is_v ? 1 : 2) * kv_heads;
    const int source = is_value && k_is_v ? head - kv_heads : head;
    const float* in = qkv + ((size_t)row * sources + source) * head_dim;
    const float* weight = is_query ? q_weight : is_value ? nullptr : k_weight;
    const bool halves = !interleaved && !is_value;
    float x[MOST], y[MOST], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        const int pair = lane + 32 * i;
        x[i] = y[i] = 0.0f;
        if (pair < half_dim) {
            x[i] = in[halves ? pair : 2 * pair];
            y[i] = in[halves ? pair + half_dim : 2 * pair + 1];
        }
        sum = fmaf(x[i], x[i], sum);
        sum = fmaf(y[i], y[i], sum);
    }
    sum = warp_sum(sum);
    const bool normed = weight != nullptr || (is_value && v_norm);
    const float scale = normed ? 1.0f / sqrtf(sum / (float)head_dim + eps) : 1.0f;
    half_bits* to;
    const int slot = position % 16;
    if (is_query) {
        to = q + ((size_t)row * heads + head) * padded_dim;
    } else {
        const int page = page_table[(size_t)sequences[row] * inputs[0] + position / 16];
        to = pages + page * page_stride + (size_t)(head - heads) * 16 * padded_dim;
    }
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        const int pair = lane + 32 * i;
        if (pair >= pairs) continue;
        int a = 2 * pair, b = 2 * pair + 1;
        float u = x[i] * scale, v = y[i] * scale;
        if (pair < half_dim) {
            if (halves) a = pair, b = pair + half_dim;
            if (weight != nullptr) u *= weight[a], v *= weight[b];
            if (!is_value) {
                const float c = cosines[(size_t)position * half_dim + pair];
                const float s = sines[(size_t)position * half_dim + pair];
                const float turned = __fmaf_rn(u, c, -__fmul_rn(v, s));
                v = __fmaf_rn(u, s, __fmul_rn(v, c));
                u = turned;
            }
        }
        if (is_query)
            to[a] = to_half(u), to[b] = to_half(v);
        else if (is_value)
            to[value_place(slot, a)] = to_half(u), to[value_place(slot, b)] = to_half(v);
        else
            to[key_place(slot, a)] = to_half(u), to[key_place(slot, b)] = to_half(v);
    }
}
