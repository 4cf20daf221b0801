// y = x W^T for 9 to 32 rows on sm_90a: `multirow` by warpgroups, which multiply with wgmma.
//
// A block makes 64 outputs at a time, a tile for each warp of a *team* of four. Weights come through
// registers as the A operand, unpacked as everywhere; inputs lie in shared memory as the B operand,
// so that they take no registers and one instruction multiplies all rows. The tensor cores add up
// wgmma as they do mma.m16n8k16, so bytes are those of the other kernels; a test compares them.
//
// Teams take the slices of a span in turn. The running sum of a span's slices lies in shared memory
// and passes from team to team in the slices' order. Blocks of a cluster share the spans; each keeps
// the inputs of its own spans, and the spans' sums of a batch of outputs until all blocks are there.
//
// Macros besides those of the layout: STAGES of the ring, TEAMS, MOST (groups of 64 outputs in a batch).
// SIDE is 1.

#include "async.cuh"
#include "linear_inner.cuh"

constexpr int TEAM_TILES = 4;  // a warpgroup's outputs: one tile for each of its warps
constexpr int TEAM_THREADS = 128;
constexpr int TEAM_WARPS = TEAMS * 4;
constexpr int THREADS = TEAMS * TEAM_THREADS + 32;  // and a warp that copies
constexpr int STAGE_BYTES = TEAM_TILES * PIECE_BYTES;
constexpr int SPAN_CHUNKS = WARPS * CHUNKS;
constexpr int OWN_CHUNKS = OWN_TURNS * SPAN_CHUNKS;
constexpr int CORE_BYTES = 128;  // 8 rows by 8 columns of bfloat16
// A barrier's parity tells a lap of the ring from the next, no more. A team that begins a unit knows that
// the unit it had before has arrived, and all before that, so a lap before must lie no later.
static_assert(STAGES >= TEAMS * PIECES, "no team is a lap ahead of the copies");

// Registers that an unfinished wgmma writes stay where they are: nothing moves across this.
__device__ __forceinline__ void hold(float& value) { asm volatile("" : "+f"(value)::"memory"); }

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// sum (+)= A B^T for 8 * tiles rows and 16 columns; `inputs` describes B in shared memory.
#define SLIPSTREAM_WGMMA(n, sums, after)                                                     \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #after ", 0;\n"                    \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" sums "}, "

template <int tiles>
__device__ __forceinline__ void multiply_team(float (&sum)[tiles][4], const u32 (&a)[4], u64 inputs,
                                              int adds) {
  static_assert(tiles >= 1 && tiles <= 4, "8 to 32 rows");
#define SUM(t) "+f"(sum[t][0]), "+f"(sum[t][1]), "+f"(sum[t][2]), "+f"(sum[t][3])
#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(inputs), "r"(adds)
  if constexpr (tiles == 1) {
    SLIPSTREAM_WGMMA(8, "%0,%1,%2,%3", 9)
    "{%4,%5,%6,%7}, %8, adds, 1, 1, 0;\n}" : SUM(0) : OPERANDS);
  } else if constexpr (tiles == 2) {
    SLIPSTREAM_WGMMA(16, "%0,%1,%2,%3,%4,%5,%6,%7", 13)
    "{%8,%9,%10,%11}, %12, adds, 1, 1, 0;\n}" : SUM(0), SUM(1) : OPERANDS);
  } else if constexpr (tiles == 3) {
    SLIPSTREAM_WGMMA(24, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11", 17)
    "{%12,%13,%14,%15}, %16, adds, 1, 1, 0;\n}" : SUM(0), SUM(1), SUM(2) : OPERANDS);
  } else {
    SLIPSTREAM_WGMMA(32, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", 21)
    "{%16,%17,%18,%19}, %20, adds, 1, 1, 0;\n}"
        : SUM(0), SUM(1), SUM(2), SUM(3) : OPERANDS);
  }
#undef SUM
#undef OPERANDS
}

// Describe the B operand of one step: core matrices of 128 bytes, two along K, then `tiles` of rows.
__device__ __forceinline__ u64 describe(const char* inputs) {
  constexpr u64 along_k = CORE_BYTES >> 4, along_rows = 2 * CORE_BYTES >> 4;
  return u64(shared_address(inputs) >> 4 & 0x3FFF) | along_k << 16 | along_rows << 32;
}

// One lane's inputs of a chunk for one tile of rows, in the order of the steps' B operands.
struct ChunkWords {
  u32 words[STEPS][2];

  __device__ __forceinline__ void read(const u16* row, int column, int k, bool live, int lane) {
    constexpr int share = RUN / 4;
    const int first = column + (lane & 3) * share;
#pragma unroll
    for (int run = 0; run < CHUNK / RUN; ++run) {
      const bool valid = live && first + run * RUN < k;
      const u16* from = row + first + run * RUN;
      if constexpr (RUN == 32) {
        uint4 values = make_uint4(0, 0, 0, 0);
        if (valid) values = *reinterpret_cast<const uint4*>(from);
        words[2 * run][0] = values.x, words[2 * run][1] = values.y;
        words[2 * run + 1][0] = values.z, words[2 * run + 1][1] = values.w;
      } else {
        uint2 values = make_uint2(0, 0);
        if (valid) values = *reinterpret_cast<const uint2*>(from);
        words[run][0] = values.x, words[run][1] = values.y;
      }
    }
  }

  __device__ __forceinline__ void load(int, int step, u32 (&b)[2]) const {
    b[0] = words[step][0], b[1] = words[step][1];
  }
};

template <int tiles>
struct Block {
  static constexpr int input_bytes = OWN_CHUNKS * STEPS * tiles * 2 * CORE_BYTES;
  static constexpr int sums_size = HAS_OFFSET ? OWN_CHUNKS * GROUPS * tiles * 8 : 0;
  static constexpr int item_size = tiles * TEAM_THREADS;  // float4 of a group's and a span's sums

  char* ring;         // (STAGES, STAGE_BYTES)
  char* inputs;       // (OWN_CHUNKS, STEPS, tiles, 2, CORE_BYTES)
  float4* items;      // (MOST, OWN_TURNS, tiles, TEAM_THREADS)
  float* input_sums;  // (OWN_CHUNKS, GROUPS, tiles, 8)
  u64 *full, *empty;  // STAGES each
  u64* passed;        // TEAM_WARPS: this warp has added its slice

  int rank, worker, workers, num_tiles, own_groups;

  __device__ __forceinline__ Block(char* shared, int n) {
    inputs = shared;
    ring = inputs + input_bytes;
    items = reinterpret_cast<float4*>(ring + STAGES * STAGE_BYTES);
    input_sums = reinterpret_cast<float*>(items + MOST * OWN_TURNS * item_size);
    full = reinterpret_cast<u64*>(input_sums + sums_size);
    empty = full + STAGES;
    passed = empty + STAGES;
    rank = blockIdx.x % BLOCKS, worker = blockIdx.x / BLOCKS, workers = gridDim.x / BLOCKS;
    num_tiles = (n + TILE - 1) / TILE;
    const int groups = (num_tiles + TEAM_TILES - 1) / TEAM_TILES;
    own_groups = (groups - worker + workers - 1) / workers;
  }

  __device__ __forceinline__ int first_tile(int group) const {
    return (worker + group * workers) * TEAM_TILES;
  }
};

struct Stage {
  int at = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance(int by) {
    at += by;
    if (at >= STAGES) at -= STAGES, parity ^= 1;
  }
};

// Copy the pieces of groups [first, last), a lane for each tile.
template <int tiles>
__device__ __forceinline__ void copy_groups(const Block<tiles>& block, const char* weight,
                                            int first, int last, Stage& stage, int lane,
                                            u64 policy) {
  for (int group = first; group < last; ++group) {
    const int tile = block.first_tile(group);
    const int valid = min(TEAM_TILES, block.num_tiles - tile);
    const char* group_from = weight + (size_t(tile + min(lane, valid - 1)) * SPLITS +
                                       block.rank * OWN_TURNS) * SPAN_BYTES;
    for (int unit = 0; unit < OWN_TURNS * WARPS; ++unit) {
      const char* from = group_from + unit / WARPS * SPAN_BYTES + unit % WARPS * PIECE_BYTES;
      for (int piece = 0; piece < PIECES; ++piece) {
        wait_barrier(block.empty + stage.at, stage.parity ^ 1);
        order_before_copies();
        const u32 at = shared_address(block.full + stage.at);
        if (lane == 0)
          asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at),
                       "r"(valid * PIECE_BYTES)
                       : "memory");
        __syncwarp();
        if (lane < valid)
          asm volatile(
              "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
              "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(
                  block.ring + stage.at * STAGE_BYTES + lane * PIECE_BYTES)),
              "l"(from + piece * LAYER_BYTES), "r"(PIECE_BYTES), "r"(at), "l"(policy)
              : "memory");
        stage.advance(1);
      }
    }
  }
}

// Bring the inputs of the block's spans into shared memory, scaled, and sum them by groups.
template <int tiles>
__device__ __forceinline__ void prepare_inputs(const Block<tiles>& block, const u16* x, int k,
                                               int rows, int warp, int lane) {
  constexpr int tasks = OWN_CHUNKS * tiles, at_once = 4;
  for (int first = warp * at_once; first < tasks; first += TEAM_WARPS * at_once) {
    ChunkWords some[at_once];
#pragma unroll
    for (int u = 0; u < at_once; ++u) {
      const int chunk = (first + u) / tiles, row = (first + u) % tiles * 8 + (lane >> 2);
      some[u].read(x + size_t(row) * k, (block.rank * OWN_CHUNKS + chunk) * CHUNK, k,
                   row < rows && first + u < tasks, lane);
    }
#pragma unroll
    for (int u = 0; u < at_once; ++u) {
      const int chunk = (first + u) / tiles, tile = (first + u) % tiles;
      if (first + u >= tasks) break;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        u32(&words)[2] = some[u].words[step];
        scale_inputs(words[0], words[1]);
        u32* to = reinterpret_cast<u32*>(
            block.inputs + ((chunk * STEPS + step) * tiles + tile) * 2 * CORE_BYTES);
        to[lane] = words[0], to[CORE_BYTES / 4 + lane] = words[1];
      }
      if constexpr (HAS_OFFSET)
        sum_inputs<tiles>(some[u], tile, block.input_sums + chunk * GROUPS * tiles * 8, lane);
    }
  }
}

// Start the products of a chunk, a chain for each group.
template <int tiles>
__device__ __forceinline__ void start_chunk(const u32 (&a)[STEPS][TERMS][4], u64 inputs,
                                            float (&products)[GROUPS][tiles][4]) {
  begin_products();
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int term = 0; term < TERMS; ++term)
      multiply_team<tiles>(products[step / GROUP_STEPS], a[step][term],
                           inputs + step * (tiles * 2 * CORE_BYTES >> 4),
                           step % GROUP_STEPS != 0 || term != 0);
  commit_products();
}

template <int tiles>
__device__ __forceinline__ void hold_all(float (&products)[GROUPS][tiles][4]) {
#pragma unroll
  for (int group = 0; group < GROUPS; ++group)
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) hold(products[group][tile][i]);
}

// Multiply this team's slices of groups [first, last) and pass the spans' running sums on.
template <int tiles>
__device__ __forceinline__ void multiply_units(const Block<tiles>& block, int first, int last,
                                               Stage& stage, int& unit, int team, int warp,
                                               int lane) {
  constexpr int units = OWN_TURNS * WARPS;  // of a group
  const int thread = warp % 4 * 32 + lane;
  for (const int end = last * units; unit < end; unit += TEAMS) {
    const int own = unit % units;
    float sum[tiles][4] = {};
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      wait_barrier(block.full + stage.at, stage.parity);
      const char* codes = block.ring + stage.at * STAGE_BYTES + warp % 4 * PIECE_BYTES;
      const char* scales = codes + PIECE_CHUNKS * CHUNK_CODE_BYTES;
      // Two chunks are under way at a time, where their sums leave registers for it.
      constexpr int buffers = GROUPS * tiles > 8 ? 1 : 2, behind = buffers - 1;
      float products[buffers][GROUPS][tiles][4];
#pragma unroll
      for (int i = 0; i < PIECE_CHUNKS + behind; ++i) {
        const int chunk = own * CHUNKS + piece * PIECE_CHUNKS + i, done = i - behind;
        if (i < PIECE_CHUNKS) {
          const ChunkCodes of(codes + i * CHUNK_CODE_BYTES, lane);
          u32 a[STEPS][TERMS][4];
#pragma unroll
          for (int step = 0; step < STEPS; ++step) of.load(step, a[step]);
          start_chunk<tiles>(a, describe(block.inputs + chunk * (STEPS * tiles * 2 * CORE_BYTES)),
                             products[i % buffers]);
        }
        if (done >= 0) {
          if (i < PIECE_CHUNKS) wait_products<behind>();
          else wait_products<0>();
          hold_all<tiles>(products[done % buffers]);
          add_chunk<tiles>(products[done % buffers], scales + done * CHUNK_SCALE_BYTES,
                           block.input_sums + (chunk - behind) * GROUPS * tiles * 8, lane, sum);
        }
      }
      __syncwarp();
      if (lane == 0) arrive(block.empty + stage.at);
      stage.advance(1);
    }
    stage.advance((TEAMS - 1) * PIECES % STAGES);  // the other teams' stages
    if constexpr ((TEAMS - 1) * PIECES / STAGES % 2 == 1) stage.parity ^= 1;
    finish_slice(sum);

    // All slices wait for the one before, so that a sum is read before it is written anew.
    if (unit > 0)
      wait_barrier(block.passed + (unit - 1) % TEAMS * 4 + warp % 4, (unit - 1) / TEAMS & 1);
    float4* item = block.items +
                   ((unit / units - first) * OWN_TURNS + own / WARPS) * Block<tiles>::item_size +
                   thread;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      float4 total = make_float4(sum[tile][0], sum[tile][1], sum[tile][2], sum[tile][3]);
      if (own % WARPS != 0) {
        const float4 before = item[tile * TEAM_THREADS];
        total = make_float4(before.x + total.x, before.y + total.y, before.z + total.z,
                            before.w + total.w);
      }
      item[tile * TEAM_THREADS] = total;
    }
    __syncwarp();
    if (lane == 0) arrive(block.passed + warp);
  }
}

// Add the spans' sums of groups [first, last), each block of the cluster a share.
template <int tiles>
__device__ __forceinline__ void add_items(const Block<tiles>& block, float* out,
                                          const float* residual, int first, int last, int n,
                                          int out_stride, int residual_stride, int rows) {
  constexpr int size = Block<tiles>::item_size;
  for (int at = threadIdx.x + block.rank * THREADS; at < (last - first) * size;
       at += THREADS * BLOCKS) {
    const int group = at / size, within = at % size;
    float total[4];
#pragma unroll
    for (int split = 0; split < SPLITS; ++split) {
      const float4* item = block.items + (group * OWN_TURNS + split % OWN_TURNS) * size + within;
      const float4 sums = CLUSTERED ? read_cluster_4(item, split / OWN_TURNS) : *item;
      total[0] = split == 0 ? sums.x : total[0] + sums.x;
      total[1] = split == 0 ? sums.y : total[1] + sums.y;
      total[2] = split == 0 ? sums.z : total[2] + sums.z;
      total[3] = split == 0 ? sums.w : total[3] + sums.w;
    }
    const int thread = within % TEAM_THREADS, lane = thread % 32;
    const int row = within / TEAM_THREADS * 8 + 2 * (lane & 3);
    const int output = (block.first_tile(first + group) + thread / 32) * TILE + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + (i & 1) >= rows || output + 8 * (i >> 1) >= n) continue;
      const size_t of_row = row + (i & 1), at_column = output + 8 * (i >> 1);
      if (residual != nullptr) total[i] += residual[of_row * residual_stride + at_column];
      out[of_row * out_stride + at_column] = total[i];
    }
  }
}

template <int tiles>
__global__ void __launch_bounds__(THREADS, 1)
    team_rows(const char* weight, const u16* x, float* out, const float* residual, int n, int k,
              int out_stride, int residual_stride, int num_rows) {
  extern __shared__ __align__(128) char shared[];
  const int first_row = blockIdx.y * tiles * 8;
  const int rows = min(tiles * 8, num_rows - first_row);
  const Block<tiles> block(shared, n);
  x += size_t(first_row) * k;
  out += size_t(first_row) * out_stride;
  if (residual != nullptr) residual += size_t(first_row) * residual_stride;

  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(block.full + stage, 1);
      init_barrier(block.empty + stage, 4);
    }
    for (int at = 0; at < TEAM_WARPS; ++at) init_barrier(block.passed + at, 1);
    publish_barriers();
  }
  __syncthreads();
  allow_next_kernel();

  const bool copies = warp == TEAM_WARPS;
  const int team = warp / 4;
  u64 policy = 0;
  Stage stage;
  int unit = team;
  if (copies) {
    if (gridDim.y == 1) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  } else {
    wait_for_previous_kernel();
    prepare_inputs<tiles>(block, x, k, rows, warp, lane);
    order_before_copies();  // the tensor cores read them another way
    asm volatile("bar.sync 1, %0;" ::"n"(TEAMS * TEAM_THREADS) : "memory");
    for (int skipped = 0; skipped < team * PIECES; ++skipped) stage.advance(1);
  }
  for (int first = 0; first < block.own_groups; first += MOST) {
    const int last = min(first + MOST, block.own_groups);
    if (copies) {
      copy_groups<tiles>(block, weight, first, last, stage, lane, policy);
      wait_for_previous_kernel();
    } else {
      multiply_units<tiles>(block, first, last, stage, unit, team, warp, lane);
    }
    __syncthreads();
    if constexpr (CLUSTERED) meet_cluster();
    add_items<tiles>(block, out, residual, first, last, n, out_stride, residual_stride, rows);
    if constexpr (CLUSTERED) meet_cluster();  // others may still read this block's sums
    else if (last < block.own_groups) __syncthreads();
  }
}
