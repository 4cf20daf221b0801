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

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// silu(gate) * up as bfloat16 for rows of gate, then up. Grid (column blocks, rows).
extern "C" __global__ void gated(const float* gate_up, bfloat16_bits* out, int width) {
    let_next_start();
    wait_for_inputs();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i * 4 >= width) return;
    const float* row = gate_up + (size_t)blockIdx.y * 2 * width;
    const float4 gate = ((const float4*)row)[i];
    const float4 up = ((const float4*)(row + width))[i];
    ((uint2*)(out + (size_t)blockIdx.y * width))[i] =
        make_uint2(pack_bfloat16(silu(gate.x) * up.x, silu(gate.y) * up.y),
                   pack_bfloat16(silu(gate.z) * up.z, silu(gate.w) * up.w));
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
