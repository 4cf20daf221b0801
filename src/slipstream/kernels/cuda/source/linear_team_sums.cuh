// What becomes of a slice's sums: spans in shared memory, parts between blocks, outputs.
#pragma once

#include "linear_team_block.cuh"

// Add what lies at `from`, a float4 for each tile, before `sum`.
template <int tiles>
__device__ __forceinline__ void add_before(const float4* from, float (&sum)[tiles][4]) {
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) {
    const float4 before = from[tile * TEAM_THREADS];
    sum[tile][0] = before.x + sum[tile][0], sum[tile][1] = before.y + sum[tile][1];
    sum[tile][2] = before.z + sum[tile][2], sum[tile][3] = before.w + sum[tile][3];
  }
}

template <int tiles>
__device__ __forceinline__ void keep(float4* to, const float (&sum)[tiles][4]) {
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile)
    to[tile * TEAM_THREADS] = make_float4(sum[tile][0], sum[tile][1], sum[tile][2], sum[tile][3]);
}

// Where outputs go; a lane has two columns of two rows.
struct Outputs {
  float* out;
  const float* residual;
  int n, out_stride, residual_stride, rows;

  // The rows and columns of a lane's four outputs.
  struct Place {
    int row, column;
    __device__ __forceinline__ Place(int tile, int first_output, int lane, int i)
        : row(tile * 8 + 2 * (lane & 3) + (i & 1)),
          column(first_output + (lane >> 2) + 8 * (i >> 1)) {}
  };

  __device__ __forceinline__ void read(int tile, int first_output, int lane,
                                       float (&before)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Place at(tile, first_output, lane, i);
      before[i] = 0;
      if (residual != nullptr && at.row < rows && at.column < n)
        before[i] = residual[size_t(at.row) * residual_stride + at.column];
    }
  }

  __device__ __forceinline__ void write(int tile, int first_output, int lane,
                                        const float (&before)[4], const float (&sum)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Place at(tile, first_output, lane, i);
      if (at.row >= rows || at.column >= n) continue;
      out[size_t(at.row) * out_stride + at.column] =
          residual != nullptr ? sum[i] + before[i] : sum[i];
    }
  }
};

// Sums on their way between the blocks of a cluster. Part `part` of a group is added up by block
// part % BLOCKS, one group later, so that it seldom has to wait for what others send.
template <int tiles>
struct Exchange {
  using Of = Block<tiles>;
  const Of& block;
  const Outputs& outputs;
  int warp, lane;  // warp of a team

  __device__ __forceinline__ void send(int group, int split, const float (&sum)[tiles][4]) const {
    const int slot = group % SLOTS;
    if (group >= SLOTS) {
      wait_barrier(block.taken + slot, group / SLOTS + 1 & 1);
      order_before_copies();
    }
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int part = tile * 4 + warp, owner = part % BLOCKS;
      const int place = slot * Of::own_parts + part / BLOCKS;
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, "
          "%4}, [%5];" ::"r"(in_cluster(block.inbox + (place * SPLITS + split) * 32 + lane, owner)),
          "f"(sum[tile][0]), "f"(sum[tile][1]), "f"(sum[tile][2]), "f"(sum[tile][3]),
          "r"(in_cluster(block.sent + place, owner))
          : "memory");
    }
  }

  // Add up the spans of this block's parts of a group and write the outputs; a whole team calls it.
  __device__ __forceinline__ void finish(int group) const {
    const int slot = group % SLOTS;
#pragma unroll
    for (int first = 0; first < Of::own_parts; first += 4) {
      const int own = first + warp, part = own * BLOCKS + block.rank;
      if (own >= Of::own_parts || part >= Of::parts) break;
      const int place = slot * Of::own_parts + own, tile = part / 4;
      const int first_output = (block.first_tile(group) + part % 4) * TILE;
      if (lane == 0) expect_bytes(block.sent + place, SPLITS * 32 * 16);
      float before[4], sum[4];
      outputs.read(tile, first_output, lane, before);
      wait_barrier(block.sent + place, group / SLOTS & 1);
      const float4* from = block.inbox + place * SPLITS * 32 + lane;
#pragma unroll
      for (int split = 0; split < SPLITS; ++split) {
        const float4 span = from[split * 32];
        sum[0] = split == 0 ? span.x : sum[0] + span.x;
        sum[1] = split == 0 ? span.y : sum[1] + span.y;
        sum[2] = split == 0 ? span.z : sum[2] + span.z;
        sum[3] = split == 0 ? span.w : sum[3] + span.w;
      }
      if (group + SLOTS < block.own_groups) {
        order_before_copies();
        __syncwarp();
        if (lane < BLOCKS) arrive_in_cluster(in_cluster(block.taken + slot, lane));
      }
      outputs.write(tile, first_output, lane, before, sum);
    }
  }
};
