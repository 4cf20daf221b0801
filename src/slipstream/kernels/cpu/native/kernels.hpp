// The arithmetic of the CPU back end: plain functions over raw pointers, one table per ISA path.
//
// A function computes a range of outputs on the calling thread and knows nothing of threads. Every
// output element is computed by one call, in one fixed order, whatever the range, so results do not
// depend on how ranges are cut.
#pragma once

#include "matrix.hpp"

constexpr int MAX_SHARE = 16;   // rows that can share one read of quantized weights
constexpr int SPLIT_PAGES = 4;  // KV pages of one attention split, at absolute positions
constexpr int SPLIT = SPLIT_PAGES * LANES;
constexpr int MAX_HEAD_DIM = 512;

// One row's 32 activations of one group, rounded to int8: x = scale * q.
struct Act {
  int8_t q[GROUP];
  float scale;
  float scaled_sum;     // scale * sum(q), what a weight's bias multiplies
  int32_t minus_8sum;   // -8 * sum(q): an integer accumulator's start for zero point 8
  int32_t minus_128sum;
  int32_t minus_32half[2];  // -32 times the sum of either half, for groups of 16
};
static_assert(sizeof(Act) == 56, "activation blocks are packed");

// Where a product goes: out = sum (+ bias) (+ residual), rows `ldo` and `ldr` floats apart.
struct Output {
  float* out;
  int ldo;
  const float* bias;  // one row for all; null for none, as the residual
  const float* residual;
  int ldr;

  Output at(int row, int column) const {
    return {out + size_t(row) * size_t(ldo) + column, ldo, bias ? bias + column : nullptr,
            residual ? residual + size_t(row) * size_t(ldr) + column : nullptr, ldr};
  }
};

enum class Activation { silu, gelu_tanh };

// One layer's attention, as models.arch.AttentionArch.
struct Attention {
  int heads, kv_heads, head_dim;
  const float* cos;  // (max_len, head_dim / 2)
  const float* sin;
  bool interleaved;
  float scale;
  int window;     // positions that a row sees, its own included; 0 sees all
  float softcap;  // of scores; 0 for none
  bool v_norm, k_is_v;
};

// A layer's attention and its share of the pages, `page_stride` halves apart.
// K of a page: [kv_head][head_dim][16 positions] fp16; V: [kv_head][16 positions][head_dim] fp16.
struct KVView : Attention {
  uint16_t* k;
  uint16_t* v;
  size_t page_stride;

  int group() const { return heads / kv_heads; }
  // The first position that a row sees.
  int first_seen(int position) const {
    return window && position >= window ? position + 1 - window : 0;
  }
};

// RMS norms of single heads, before rotation; null weights for none.
struct HeadNorms {
  const float* q = nullptr;
  const float* k = nullptr;
  float eps = 0;
};

// One step's rows, as kernels.ops.Rows.
struct RowsView {
  int rows;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* sequences;
  const int32_t* page_table;
  int table_stride;
};

// Where a product's weights are, and KV that it asks memory for on the side, for the attention after it:
// a product of several rows computes longer than its weights take to arrive, while an attention waits
// for its pages.
struct Fetch {
  bool cached = false;                  // caches hold the weights
  const int32_t* pages = nullptr;
  int num_pages = 0;
  const uint8_t* layer = nullptr;       // the layer's part of page 0
  size_t page_stride = 0, part = 0;     // bytes from page to page, bytes of the layer's part
  int lines = 0;                        // of 64 bytes to ask for with every group of columns
  int page = 0;                         // how far it has come
  size_t done = 0;

  // Where the next `groups` groups find their lines; null when all is asked for.
  const uint8_t* take(int groups) {
    if (page == num_pages || !lines) return nullptr;
    const size_t bytes = size_t(groups) * size_t(lines) * 64, last = bytes < part ? part - bytes : 0;
    const uint8_t* const at =
        layer + size_t(pages[page]) * page_stride + (done < last ? done : last);
    done += bytes;
    if (done >= part) ++page, done = 0;
    return at;
  }
};

using Matmul = void(const Matrix&, const Act* acts, int rows, int share, int tile0, int tile1,
                    const Output&, Fetch&);

struct Kernels {
  // Round one row's int8 groups [group0, group1); x is the row's column 0. Rows lie in blocks of
  // `share`: acts[block * share * groups + group * rows_in_block + row % share].
  void (*quantize)(const float* x, int row, int rows, int share, int groups, int group0, int group1,
                   Act* acts);
  // out[r][n] = sum_k w[n][k] x[r][k] for tiles [tile0, tile1); `share` rows use one read of a
  // weight. The fetch goes on from call to call.
  Matmul* matmul_quantized;
  void (*matmul_dense)(const Matrix&, const float* x, int ldx, int rows, int share, int tile0,
                       int tile1, const Output&);
  // out[k] = scale * row `id` of the matrix.
  void (*embed)(const Matrix&, int32_t id, float scale, float* out);
  // out = x / sqrt(mean(x**2) + eps) * weight, n columns; a null weight is one of ones.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  // out = (residual + rms_norm(x)) * scale, n columns.
  void (*norm_add)(const float* residual, const float* x, const float* weight, float eps,
                   float scale, int n, float* out);
  // out = activation(gate) * up, n columns.
  void (*gated)(const float* gate, const float* up, int n, Activation, float* out);
  // x = cap * tanh(x / cap) in place, n columns.
  void (*softcap)(float* x, int n, float cap);
  // Units [unit0, unit1) of heads + kv_heads: norm and rotate a query head into q_out, or norm,
  // rotate and write a key head with its value head to the pages. qkv and q_out are the row's own.
  void (*rope_append)(const KVView&, const HeadNorms&, const RowsView&, int row, int unit0,
                      int unit1, const float* qkv, float* q_out);
  // out[head_dim] = one query head, normed and turned by a position's angles.
  void (*rotate)(const Attention&, const HeadNorms&, int position, const float* x, float* out);
  // Attention of `num` rows of one sequence from row0, with one KV head, over one split. Per row
  // and query head of the group a partial of 16 + head_dim floats: maximum, sum, 14 unused,
  // unnormalised outputs. Rows that see nothing of the split leave their partial alone. The keys
  // of what most likely comes next are asked for meanwhile: of the next split, else the next head, else
  // the rows from next_row (-1 for none).
  void (*attend)(const KVView&, const RowsView&, int row0, int num, int next_row, int kv_head,
                 int split, const float* q, int ldq, float* partials);
  // running = running + partial, rescaled to the larger maximum; `count` heads, `stride` floats
  // apart in both.
  void (*fold)(float* running, const float* partial, int count, size_t stride, int head_dim);
  // out[head_dim] = running, normalised.
  void (*finish)(const float* running, int head_dim, float* out);
  // Index of the first largest of x[n0, n1).
  int32_t (*argmax)(const float* x, int n0, int n1);
};

const Kernels* portable_kernels();
const Kernels* avx512_kernels();  // defined where SLIPSTREAM_AVX512 is; ask avx512_supported first
bool avx512_supported();          // false where this build or this processor lacks the path

// Products of quantized matrices, in translation units of their own: by kind, for either path.
Matmul portable_matmul, avx512_matmul;
Matmul* portable_two_level(const Matrix&);
Matmul* avx512_two_level(const Matrix&);
Matmul* portable_other(const Matrix&);
Matmul* avx512_other(const Matrix&);
