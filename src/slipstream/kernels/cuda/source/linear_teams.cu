// y = x W^T for up to 32 rows on sm_90a: `multirow` by warpgroups, which multiply with wgmma.
//
// A block makes 64 outputs at a time, a tile for each warp of a *team* of four. Weights come through
// registers as the A operand, unpacked as everywhere; inputs lie in shared memory as the B operand,
// so that they take no registers and one instruction multiplies all rows. The tensor cores add up
// wgmma as they do mma.m16n8k16, so bytes are those of the other kernels; a test compares them.
//
// Teams take the slices of a block's spans in turn. A span's running sum passes from slice to slice
// through shared memory, in their order. Where blocks of a cluster share the spans, each warp sends
// what it has of a span to the block that adds it up, a part of a group's outputs each; nobody waits
// for a whole block.
//
// Macros besides those of the layout: STAGES of the ring, TEAMS, SLOTS (groups of 64 outputs whose
// sums may be on their way from block to block). SIDE is 1.

#include "linear_team_inputs.cuh"
#include "linear_team_products.cuh"
#include "linear_team_sums.cuh"

// Copy the pieces of all groups, a lane for each tile.
template <int tiles>
__device__ __forceinline__ void copy_groups(const Block<tiles>& block, const char* weight, int lane,
                                            u64 policy) {
  Stage stage;
  for (int group = 0; group < block.own_groups; ++group) {
    const int tile = block.first_tile(group);
    const int valid = min(TEAM_TILES, block.num_tiles - tile);
    const char* group_from = weight + (size_t(tile + min(lane, valid - 1)) * SPLITS +
                                       block.rank * OWN_TURNS) * SPAN_BYTES;
    for (int unit = 0; unit < UNITS; ++unit) {
      const char* from = group_from + unit / WARPS * SPAN_BYTES + unit % WARPS * PIECE_BYTES;
      for (int piece = 0; piece < PIECES; ++piece) {
        wait_barrier(block.empty + stage.at, stage.parity ^ 1);
        order_before_copies();
        const u32 at = shared_address(block.full + stage.at);
        if (lane == 0) expect_bytes(block.full + stage.at, valid * PIECE_BYTES);
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

// Multiply this team's slices and pass the sums on.
template <int tiles>
__device__ __forceinline__ void multiply_slices(const Block<tiles>& block,
                                                const SliceInputs<tiles>& slices,
                                                const Outputs& outputs, int team, int warp,
                                                int lane) {
  const int thread = warp * 32 + lane;
  const Exchange<tiles> exchange{block, outputs, warp, lane};
  const u64 inputs = describe(block.inputs);
  float4* const item = block.items + thread;
  Stage stage;
  stage.advance(team * PIECES);
  int group = 0, own = team;
  for (int unit = team;; unit += TEAMS, own += TEAMS) {
    while (own >= UNITS) own -= UNITS, ++group;
    if (group >= block.own_groups) break;
    if (group == 0) {
      if constexpr (AHEAD * TEAMS < UNITS) {
        if (own + AHEAD * TEAMS < UNITS) slices.fetch(own + AHEAD * TEAMS);
      }
      commit_copies();
      wait_copies<AHEAD>();
      slices.lay_out(own);
    }
    if (group == 0 || UNITS % TEAMS != 0) wait_barrier(block.ready + own, 0);

    float sum[tiles][4] = {};
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      wait_barrier(block.full + stage.at, stage.parity);
      const char* codes = block.ring + stage.at * STAGE_BYTES + warp * PIECE_BYTES;
      const int first = own * CHUNKS + piece * PIECE_CHUNKS;
      multiply_piece<tiles>(codes, inputs + first * (STEPS * tiles * 2 * CORE_BYTES >> 4),
                            block.input_sums + first * (GROUPS * tiles * 8), lane, sum);
      pass(block.empty + stage.at, lane);
      // The other teams' stages lie between two units.
      stage.advance(piece + 1 < PIECES ? 1 : (TEAMS - 1) * PIECES + 1);
    }
    finish_slice(sum);

    // All slices wait for the one before, so that a sum is read before it is written anew.
    if (unit > 0)
      wait_barrier(block.passed + (unit - 1) % TEAMS * 4 + warp, (unit - 1) / TEAMS & 1);
    const int turn = own / WARPS, slice = own % WARPS;
    const bool ends = slice == WARPS - 1, last = own == UNITS - 1;
    if (slice > 0) add_before<tiles>(item, sum);
    if (!ends) keep<tiles>(item, sum);
    if constexpr (CLUSTERED) {
      pass(block.passed + team * 4 + warp, lane);
      if (ends) exchange.send(group, block.rank * OWN_TURNS + turn, sum);
      if (last && group > 0) exchange.finish(group - 1);
      if (last && group + 1 == block.own_groups) exchange.finish(group);
    } else {
      float4* const spans = item + Block<tiles>::item_size;
      if (ends && turn > 0) add_before<tiles>(spans, sum);
      if (ends && !last) keep<tiles>(spans, sum);
      pass(block.passed + team * 4 + warp, lane);
      if (!last) continue;
      const int first_output = (block.first_tile(group) + warp) * TILE;
      float before[tiles][4];
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
        outputs.read(tile, first_output, lane, before[tile]);
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
        outputs.write(tile, first_output, lane, before[tile], sum[tile]);
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
    for (int at = 0; at < UNITS; ++at) init_barrier(block.ready + at, 4);
    if constexpr (CLUSTERED) {
      for (int at = 0; at < SLOTS * block.own_parts; ++at) init_barrier(block.sent + at, 1);
      for (int at = 0; at < SLOTS; ++at) init_barrier(block.taken + at, block.parts);
    }
    publish_barriers();
  }
  __syncthreads();
  if constexpr (CLUSTERED) come_to_cluster();
  allow_next_kernel();

  if (warp == TEAM_WARPS) {
    u64 policy;
    if (gridDim.y == 1) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    copy_groups<tiles>(block, weight, lane, policy);
    if constexpr (CLUSTERED) await_cluster();
    return;
  }
  const int team = warp / 4;
  const SliceInputs<tiles> slices{block, x, k, rows, warp, lane};
  wait_for_previous_kernel();
#pragma unroll
  for (int ahead = 0; ahead < AHEAD; ++ahead) {
    if (team + ahead * TEAMS < UNITS) slices.fetch(team + ahead * TEAMS);
    commit_copies();
  }
  if constexpr (CLUSTERED) await_cluster();  // nothing is sent before the others are there
  const Outputs outputs{out, residual, n, out_stride, residual_stride, rows};
  multiply_slices<tiles>(block, slices, outputs, team, warp % 4, lane);
}
