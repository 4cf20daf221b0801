// Causal attention of ragged rows over fp16 pages of 16 positions, on tensor cores.
//
// Up to 16 query rows of one sequence and one KV head (rows times the query heads that share it)
// are the M side of mma.m16n8k16; each of them is computed as if it were alone. The context is cut
// into splits of 256 positions at absolute places. In a split, lane group w of LANES takes each
// LANES-th page from the w-th on, with an online softmax of its own for each row; they are added
// up in their order, and splits in the order of positions, always by the same arithmetic. Who
// computes which split, and who else rides along, never shows: a page beyond a row's position, or
// before its window, adds exact zeros to it.
//
// A page of one KV head is laid out (key_place, value_place in layers.cu) so that the words a lane
// of a warp copies to shared memory are the operands that the same lane reads: the inner loop has
// no barrier. Heads of more than 128 columns are shared by two warps, of more than 256 by four, which
// add up their scores.
//
// Compiled for one padded head size DIM (a multiple of 32) and STAGES pages in flight a warp. Where
// shared memory is short, ONE_PLACE lets the sums of a split take the place of its pages. WINDOWED: a
// row sees `window` positions, its own included. CAPPED: scores are soft-capped.
#include "step.cuh"

#define LANES (DIM > 256 ? 2 : 4)        // pages of a split that are worked on at a time
#define SPLIT_PAGES 16
#define LANE_PAGES (SPLIT_PAGES / LANES)
#define PARTS (DIM > 256 ? 4 : DIM > 128 ? 2 : 1)  // warps that share a page's columns
#define COLUMNS (DIM / PARTS)            // of one warp
#define WARPS (LANES * PARTS)
#define THREADS (WARPS * 32)
#define PITCH (DIM + 8)                  // floats; keeps lanes on different banks
#define PAGE_WORDS (2 * 16 * COLUMNS / 8)  // 16-byte words of K and V that a warp copies
#define RECORD (DIM + 4)                 // floats of a split's result: max, sum, values

struct Tile {
    int row, num_rows, last_position, sequence;
};

__device__ __forceinline__ Tile tile_of(const int* plan, int number) {
    const int4 words = __ldcg((const int4*)(plan + 4) + number);
    return {words.x, words.y, words.z, words.w};
}

// Group the live rows into tiles: neighbours of one sequence, at most `tile_rows`, cut where the
// row number is a multiple of it. One block. plan[0] gets their number; tiles start at plan + 4.
extern "C" __global__ void plan_tiles(const int* positions, const int* sequences, int* plan,
                                      int num_rows, int tile_rows) {
    __shared__ int counts[32];
    wait_for_inputs();
    int before = 0;
    for (int first = 0; first < num_rows; first += blockDim.x) {
        const int row = first + threadIdx.x;
        const bool live = row < num_rows && positions[row] >= 0;
        const bool leads = live && (row % tile_rows == 0 || positions[row - 1] < 0 ||
                                    sequences[row - 1] != sequences[row]);
        const unsigned mask = __ballot_sync(0xffffffffu, leads);
        if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = __popc(mask);
        __syncthreads();
        int place = before + __popc(mask & ((1u << threadIdx.x % 32) - 1));
        for (int i = 0; i < (int)blockDim.x / 32; i++) {
            if (i < (int)threadIdx.x / 32) place += counts[i];
            before += counts[i];
        }
        if (leads) {
            const int end = min(num_rows, row - row % tile_rows + tile_rows);
            Tile tile = {row, 1, positions[row], sequences[row]};
            for (int r = row + 1; r < end && positions[r] >= 0; r++) {
                if (sequences[r] != tile.sequence) break;
                tile.num_rows++;
                tile.last_position = max(tile.last_position, positions[r]);
            }
            ((Tile*)(plan + 4))[place] = tile;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) plan[0] = before;
}

__device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                    unsigned a3, unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void copy_async(uint4* to, const uint4* from) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

// What a row has of some positions: the largest score, and the sums of 2**(score - largest) and of
// that times V, four columns of it.
struct Part {
    float top, sum;
    float4 values;
};

__device__ __forceinline__ void fold(Part& a, const Part& b) {
    const float top = fmaxf(a.top, b.top);
    const float base = top == minus_infinity() ? 0.0f : top;  // nothing seen on either side
    const float u = exp2_fast(a.top - base), v = exp2_fast(b.top - base);
    a.top = top;
    a.sum = __fmaf_rn(a.sum, u, __fmul_rn(b.sum, v));
    a.values.x = __fmaf_rn(a.values.x, u, __fmul_rn(b.values.x, v));
    a.values.y = __fmaf_rn(a.values.y, u, __fmul_rn(b.values.y, v));
    a.values.z = __fmaf_rn(a.values.z, u, __fmul_rn(b.values.z, v));
    a.values.w = __fmaf_rn(a.values.w, u, __fmul_rn(b.values.w, v));
}

__device__ __forceinline__ Part load_part(const float* record, int column) {
    const float2 sums = __ldcg((const float2*)record);
    return {sums.x, sums.y, __ldcg((const float4*)(record + 4) + column)};
}

__device__ __forceinline__ void store_part(float* record, int column, const Part& part) {
    if (column == 0) __stcg((float2*)record, make_float2(part.top, part.sum));
    __stcg((float4*)(record + 4) + column, part.values);
}

// Wait until `count` blocks have come here. Those of one pair all run at a time: see `workers`.
__device__ __forceinline__ void wait_for_workers(unsigned* arrivals, unsigned count) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(arrivals, 1u);
        while (*(volatile unsigned*)arrivals < count) {
        }
        __threadfence();
    }
    __syncthreads();
}

// The last block to leave makes the counter zero again.
__device__ __forceinline__ void leave_workers(unsigned* arrivals, unsigned count) {
    if (threadIdx.x == 0 && atomicAdd(arrivals, 1u) == 2 * count - 1) *arrivals = 0;
}

__device__ __forceinline__ void store_row(bfloat16_bits* out, const Part& part) {
    *(uint2*)out = make_uint2(pack_bfloat16(part.values.x / part.sum, part.values.y / part.sum),
                              pack_bfloat16(part.values.z / part.sum, part.values.w / part.sum));
}

// Blocks walk over (tile, head block, worker); worker w of a tile takes splits w, w + W, ...
//   q: fp16 rows of heads * DIM, null columns beyond head_dim; out: bfloat16 rows of heads *
//   head_dim; pages: this layer's pages, `page_stride` fp16 each.
//   parts: `slots` records of RECORD floats for each row and head: one a split, or, where one
//   worker takes all splits in turn, two that carry the sum so far.
//   arrivals: a zero for every row and head block, zero again at the end.
//   scale: of scores, times log2(e); where CAPPED, over the cap instead, and `cap` times log2(e).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const half_bits* q, const half_bits* pages, long long page_stride, const int* inputs,
              const int* positions, const int* page_table, const int* plan, bfloat16_bits* out,
              float* parts, unsigned* arrivals, int slots, int in_turn, int heads, int kv_heads,
              int head_dim, float scale, float cap, int window) {
    extern __shared__ uint4 shared[];
    uint4* ring = shared;                                         // [WARPS][STAGES][PAGE_WORDS]
    // [LANES][16][PITCH]
    float* found = (float*)(ONE_PLACE ? ring : ring + WARPS * STAGES * PAGE_WORDS);
    const int taken = WARPS * STAGES * PAGE_WORDS * 4, needed = LANES * 16 * PITCH;  // floats
    float2* sums = (float2*)((float*)ring + (ONE_PLACE ? max(taken, needed) : taken + needed));
    float4* scores = (float4*)(sums + LANES * 16);                // [LANES][2][PARTS][2][32]
    __shared__ int last[16];  // a query row's own position, -1 where there is none

    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int own = threadIdx.x / 32 / PARTS, half = threadIdx.x / 32 % PARTS;
    const int group = heads / kv_heads;
    const int width = min(group, 16);  // query heads of a tile
    const int head_blocks = kv_heads * ((group + width - 1) / width);
    // Inputs and plan are older than the kernel before, which is all that is waited for.
    const Tile first_tile = tile_of(plan, 0);
    const int num_tiles = __ldcg(plan), table_stride = __ldcg(inputs);
    const int pairs = num_tiles * head_blocks;
    // More than one only where each block has one item, so that they can wait for each other.
    const int workers = in_turn ? 1 : max(1, (int)gridDim.x / max(pairs, 1));
    uint4* own_ring = ring + (own * PARTS + half) * STAGES * PAGE_WORDS + lane;
    bool waited = false;

    for (int item = blockIdx.x; item < pairs * workers; item += gridDim.x) {
        const int pair = item / workers, worker = item % workers;
        const int tile_number = pair / head_blocks;
        const Tile tile = tile_number ? tile_of(plan, tile_number) : first_tile;
        const int head_block = pair % head_blocks, kv_head = head_block % kv_heads;
        const int first_head = head_block / kv_heads * width;  // within the group
        const int last_page = tile.last_position / 16;
        const int num_splits = last_page / SPLIT_PAGES + 1;
        int lowest = 0;  // position that a row of the tile sees
        if (WINDOWED) {
            lowest = tile.last_position;
            for (int i = 0; i < tile.num_rows; i++)
                lowest = min(lowest, positions[tile.row + i]);
            lowest = max(0, lowest - window + 1);
        }
        const int before_page = lowest / 16, before_split = before_page / SPLIT_PAGES;
        if (before_split + worker >= num_splits) continue;
        const int* table = page_table + (size_t)tile.sequence * table_stride;
        const uint4* first_page =
            (const uint4*)(pages + ((size_t)kv_head * DIM + half * COLUMNS) * 16);
        const size_t to_values = (size_t)kv_heads * 16 * DIM / 8;

        // Copy number n of this warp: its n-th page, counted over all splits of the worker.
        const auto page_number = [&](int n) {
            return (before_split + worker + n / LANE_PAGES * workers) * SPLIT_PAGES +
                   n % LANE_PAGES * LANES + own;
        };
        const auto page_id = [&](int n) {
            const int page = page_number(n);
            return page <= last_page && page >= before_page ? __ldcg(table + page) : -1;
        };
        const auto copy = [&](int n, int id) {
            if (id >= 0) {
                const uint4* from = first_page + id * page_stride / 8 + lane;
                uint4* to = own_ring + n % STAGES * PAGE_WORDS;
#pragma unroll
                for (int i = 0; i < COLUMNS / 16; i++) copy_async(to + i * 32, from + i * 32);
#pragma unroll
                for (int i = 0; i < COLUMNS / 16; i++)
                    copy_async(to + (COLUMNS / 16 + i) * 32, from + to_values + i * 32);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
        int ids[STAGES + 1];
#pragma unroll
        for (int n = 0; n <= STAGES; n++) ids[n] = page_id(n);
        if (!waited) wait_for_inputs();
        waited = true;
#pragma unroll
        for (int n = 0; n < STAGES; n++) copy(n, ids[n]);
        int next_id = ids[STAGES];

        // Query rows g and g + 8 of the tile: where they are, how far they see, their columns.
        const auto place_of = [&](int m) {
            return (size_t)(tile.row + m / width) * heads + kv_head * group + first_head +
                   m % width;
        };
        const auto exists = [&](int m) {
            return m / width < tile.num_rows && first_head + m % width < group;
        };
        uint4 query[2][COLUMNS / 32];
        int limit[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int m = g + 8 * r;
            const bool is_there = exists(m);
            limit[r] = is_there ? positions[tile.row + m / width] : -1;
            const uint4* from = (const uint4*)(q + (is_there ? place_of(m) : 0) * DIM +
                                               half * COLUMNS) + c;
#pragma unroll
            for (int j = 0; j < COLUMNS / 32; j++) {
                query[r][j] = from[j * 4];
                if (!is_there) query[r][j] = make_uint4(0, 0, 0, 0);
            }
        }
        __syncthreads();  // the item before is done with `last` and what else is shared
        if (threadIdx.x < 8 * 4 && c == 0) last[g] = limit[0], last[g + 8] = limit[1];

        // The first split that row m sees.
        const auto first_of = [&](int m) {
            return WINDOWED ? max(0, last[m] - window + 1) / (16 * SPLIT_PAGES) : 0;
        };
        int n = 0;
        for (int split = before_split + worker; split < num_splits; split += workers) {
            float acc[COLUMNS / 8][4], top[2], sum[2];
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++)
                acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
            top[0] = top[1] = minus_infinity();
            sum[0] = sum[1] = 0.0f;
            for (const int end = n + LANE_PAGES; n < end; n++) {
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
                const int page = page_number(n);
                if (page <= last_page && page >= before_page) {
                    const uint4* words = own_ring + n % STAGES * PAGE_WORDS;
                    // Scores of 16 query rows and 16 keys: word t of a column chunk has the keys of
                    // tile t, and its halves go to sums of their own to shorten the chain.
                    float score[2][2][4] = {};
#pragma unroll
                    for (int j = 0; j < COLUMNS / 32; j++) {
                        const uint4 a = query[0][j], b = query[1][j];
#pragma unroll
                        for (int t = 0; t < 2; t++) {
                            const uint4 k = words[(j * 2 + t) * 32];
                            mma(score[t][0], a.x, b.x, a.y, b.y, k.x, k.y);
                            mma(score[t][1], a.z, b.z, a.w, b.w, k.z, k.w);
                        }
                    }
#pragma unroll
                    for (int t = 0; t < 2; t++)
#pragma unroll
                        for (int e = 0; e < 4; e++) score[t][0][e] += score[t][1][e];
                    if (PARTS > 1) {
                        float4* all = scores + (own * 2 + n % 2) * PARTS * 64;
#pragma unroll
                        for (int t = 0; t < 2; t++)
                            all[(half * 2 + t) * 32 + lane] = make_float4(
                                score[t][0][0], score[t][0][1], score[t][0][2], score[t][0][3]);
                        asm volatile("bar.sync %0, %1;" ::"r"(own + 1), "n"(PARTS * 32) : "memory");
#pragma unroll
                        for (int t = 0; t < 2; t++) {
                            float4 a = all[t * 32 + lane];
#pragma unroll
                            for (int p = 1; p < PARTS; p++) {
                                const float4 b = all[(2 * p + t) * 32 + lane];
                                a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w;
                            }
                            score[t][0][0] = a.x, score[t][0][1] = a.y;
                            score[t][0][2] = a.z, score[t][0][3] = a.w;
                        }
                    }
                    unsigned weights[4];
#pragma unroll
                    for (int r = 0; r < 2; r++) {  // rows g and g + 8
                        float s[4];
                        float largest = top[r];
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const int position = page * 16 + 4 * c + i;
                            bool seen = position <= limit[r];
                            if (WINDOWED) seen &= position > limit[r] - window;
                            float value = score[i / 2][0][r * 2 + i % 2] * scale;
                            if (CAPPED) value = cap * tanhf(value);
                            s[i] = seen ? value : minus_infinity();
                            largest = fmaxf(largest, s[i]);
                        }
                        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                        const float base = largest == minus_infinity() ? 0.0f : largest;
                        const float factor = exp2_fast(top[r] - base);
                        float p[4];
#pragma unroll
                        for (int i = 0; i < 4; i++) p[i] = exp2_fast(s[i] - base);
                        sum[r] = __fmaf_rn(sum[r], factor, (p[0] + p[1]) + (p[2] + p[3]));
                        weights[r] = pack_half(p[0], p[1]);
                        weights[2 + r] = pack_half(p[2], p[3]);
                        // Times 1 changes nothing, so who else needs a factor does not show.
                        if (__any_sync(0xffffffffu, largest != top[r])) {
#pragma unroll
                            for (int i = 0; i < COLUMNS / 8; i++)
                                acc[i][2 * r] *= factor, acc[i][2 * r + 1] *= factor;
                        }
                        top[r] = largest;
                    }
#pragma unroll
                    for (int i = 0; i < COLUMNS / 16; i++) {
                        const uint4 v = words[(COLUMNS / 16 + i) * 32];
                        mma(acc[2 * i], weights[0], weights[1], weights[2], weights[3], v.x, v.y);
                        mma(acc[2 * i + 1], weights[0], weights[1], weights[2], weights[3], v.z,
                            v.w);
                    }
                }
                // With one place, copies of the next split wait until this one is added up.
                const bool waits = ONE_PLACE && n + STAGES >= end;
                copy(n + STAGES, waits ? -1 : next_id);
                if (!waits) next_id = page_id(n + STAGES + 1);
            }
            if (ONE_PLACE) __syncthreads();

            // The split is done: add up the lanes, in their order.
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float total = sum[r];
                total += __shfl_xor_sync(0xffffffffu, total, 1);
                total += __shfl_xor_sync(0xffffffffu, total, 2);
                if (limit[r] < 0) continue;
                const int m = own * 16 + r * 8 + g;
                if (c == 0 && half == 0) sums[m] = make_float2(top[r], total);
#pragma unroll
                for (int i = 0; i < COLUMNS / 8; i++)
                    *(float2*)(found + m * PITCH + half * COLUMNS + 8 * i + 2 * c) =
                        make_float2(acc[i][2 * r], acc[i][2 * r + 1]);
            }
            __syncthreads();
            for (int i = threadIdx.x; i < tile.num_rows * width * DIM / 4; i += THREADS) {
                const int m = i / (DIM / 4), column = i % (DIM / 4);
                const int last_split = last[m] < 0 ? -1 : last[m] / (16 * SPLIT_PAGES);
                const int first = first_of(m);
                if (split > last_split || split < first) continue;
                Part part;
#pragma unroll
                for (int w = 0; w < LANES; w++) {
                    const float2 own_sums = sums[w * 16 + m];
                    const float4 values =
                        *(const float4*)(found + (w * 16 + m) * PITCH + column * 4);
                    if (w == 0)
                        part = {own_sums.x, own_sums.y, values};
                    else
                        fold(part, {own_sums.x, own_sums.y, values});
                }
                float* records = parts + place_of(m) * slots * RECORD;
                if (workers > 1 && last_split > first) {
                    store_part(records + (size_t)split * RECORD, column, part);
                    continue;
                }
                if (split > first) {  // two records by turns: others still read the one before
                    Part before = load_part(records + (split - 1) % 2 * RECORD, column);
                    fold(before, part);
                    part = before;
                }
                if (split < last_split)
                    store_part(records + split % 2 * RECORD, column, part);
                else if (column * 4 < head_dim)
                    store_row(out + place_of(m) * head_dim + column * 4, part);
            }
            __syncthreads();
            if (ONE_PLACE) {
#pragma unroll
                for (int i = 0; i < STAGES; i++) copy(n + i, page_id(n + i));
                next_id = page_id(n + STAGES);
            }
        }

        const int active = min(workers, num_splits - before_split);
        if (active == 1) continue;
        // Rows of several splits: workers share out the columns and add splits in their order.
        unsigned* count = arrivals + (size_t)tile.row * head_blocks + head_block;
        wait_for_workers(count, active);
        for (int i = worker * THREADS + threadIdx.x; i < tile.num_rows * width * DIM / 4;
             i += active * THREADS) {
            const int m = i / (DIM / 4), column = i % (DIM / 4);
            const int last_split = last[m] < 0 ? -1 : last[m] / (16 * SPLIT_PAGES);
            const int first = first_of(m);
            if (last_split <= first || column * 4 >= head_dim) continue;
            const float* records = parts + place_of(m) * slots * RECORD;
            Part total = load_part(records + (size_t)first * RECORD, column);
            for (int s = first + 1; s <= last_split; s += 16) {
                Part some[16];
#pragma unroll
                for (int u = 0; u < 16; u++)
                    some[u] = load_part(records + (size_t)min(s + u, last_split) * RECORD, column);
#pragma unroll
                for (int u = 0; u < 16; u++)
                    if (s + u <= last_split) fold(total, some[u]);
            }
            store_row(out + place_of(m) * head_dim + column * 4, total);
        }
        leave_workers(count, active);
    }
    if (!waited) wait_for_inputs();
}
