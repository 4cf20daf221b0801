// Attention over KV pages: split at absolute positions, softmax kept per row.
//
// A split (64 positions) is two passes: scores and their maximum, then weights and values. Splits
// are folded in order with the usual rescaling (Milakov and Gimelshein 2018). Rows of one sequence
// share each page's conversion to float32; no row's result depends on who shares it. Positions that a
// row does not see, behind it or before its window, are never multiplied with a weight.
#pragma once

#include "layers.inl"

namespace {

// One query vector: a head of a row.
struct Query {
  const float* q;
  float* partial;  // m, l, 14 unused, head_dim outputs
  int first, live;  // the row sees positions [first, live) of the split, at least one
};

// Queries lie this far apart while they are used: a constant, so that every broadcast is one
// address plus a displacement, and no multiple of the cache's ways.
constexpr int QUERY_STRIDE = MAX_HEAD_DIM + LANES;

// Where the keys lie that this thread most likely reads next: memory answers a page's first line
// later than a page takes, so they are asked for a whole split ahead.
struct Ahead {
  const uint16_t* k[SPLIT_PAGES];
};

// Scores of NQ queries against one page: even and odd dimensions in two chains. The page's values
// are asked for meanwhile: pages jump in memory, which no hardware prefetcher foresees.
template <int NQ>
inline void score_page(const uint16_t* k, int d, const float* q, const uint16_t* v,
                       float* scores) {
  S::F even[NQ], odd[NQ];
#pragma GCC unroll 12
  for (int j = 0; j < NQ; ++j) even[j] = odd[j] = S::zero();
  for (int i = 0; i < d; i += 2) {
    S::prefetch(v + i * LANES);
    const S::F k0 = S::load_half(k + i * LANES), k1 = S::load_half(k + (i + 1) * LANES);
#pragma GCC unroll 12
    for (int j = 0; j < NQ; ++j) {
      even[j] = S::fma(k0, S::set1(q[j * QUERY_STRIDE + i]), even[j]);
      odd[j] = S::fma(k1, S::set1(q[j * QUERY_STRIDE + i + 1]), odd[j]);
    }
  }
#pragma GCC unroll 12
  for (int j = 0; j < NQ; ++j) S::store(scores + j * SPLIT, S::add(even[j], odd[j]));
}

// The lanes of a page, `page` positions into the split, that a query sees; `fill` elsewhere.
inline S::F seen(const Query& query, int page, const S::F& x, const S::F& fill) {
  const int first = query.first - page, live = query.live - page;
  const S::F below = live < LANES ? S::keep(x, live, fill) : x;
  return first > 0 ? S::keep(fill, first, below) : below;
}

// Turn scores into weights exp(s - m), in place; write m and l to the partial.
inline void soften(const Query& query, float softcap, float* scores) {
  const int page0 = query.first / LANES * LANES;
  S::F best = S::set1(-INFINITY);
  for (int p = page0; p < query.live; p += LANES) {
    if (softcap > 0) S::store(scores + p, capped(S::load(scores + p), softcap));
    best = S::max(best, seen(query, p, S::load(scores + p), S::set1(-INFINITY)));
  }
  const float top = S::largest(best);
  const S::F m = S::set1(top);
  S::F total = S::zero();
  for (int p = page0; p < query.live; p += LANES) {
    const S::F weight =
        seen(query, p, exp_lanes(S::sub(S::load(scores + p), m)), S::zero());
    S::store(scores + p, weight);
    total = S::add(total, weight);
  }
  query.partial[0] = top;
  query.partial[1] = S::sum(total);
}

// Add positions [p0, p1) of one page to C times sixteen output columns of NQ queries, in order, and
// ask for keys that come next.
template <int NQ, int C>
inline void weigh(const uint16_t* v, int d, int p0, int p1, const float* weights,
                  const uint16_t* ahead, S::F (&sum)[NQ][C]) {
  for (int p = p0; p < p1; ++p) {
    for (int c = 0; c < C; c += 2) S::prefetch(ahead + (p * C + c) * LANES);
    S::F value[C];
    for (int c = 0; c < C; ++c) value[c] = S::load_half(v + size_t(p) * d + c * LANES);
#pragma GCC unroll 12
    for (int j = 0; j < NQ; ++j) {
      const S::F weight = S::set1(weights[j * SPLIT + p]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[j][c] = S::fma(weight, value[c], sum[j][c]);
    }
  }
}

// What several queries see of a split: some of them [first, live), all of them [latest, shortest).
struct Extent {
  int first = SPLIT, latest = 0, shortest = SPLIT, live = 0;

  void add(const Query& query) {
    first = query.first < first ? query.first : first;
    latest = query.first > latest ? query.first : latest;
    shortest = query.live < shortest ? query.live : shortest;
    live = query.live > live ? query.live : live;
  }
};

// Output columns [column, column + 16 C) of NQ queries over a split.
template <int NQ, int C>
inline void weigh_split(const KVView& kv, const int32_t* pages, const Ahead& ahead, size_t head,
                        int column, const float* weights, const Query* queries,
                        const Extent& extent) {
  const int d = kv.head_dim;
  S::F sum[NQ][C];
#pragma GCC unroll 12
  for (int j = 0; j < NQ; ++j)
    for (int c = 0; c < C; ++c) sum[j][c] = S::zero();
  for (int p = extent.first / LANES; p * LANES < extent.live; ++p) {
    const uint16_t* v = kv.v + size_t(pages[p]) * kv.page_stride + head + column;
    const int start = p * LANES;
    const auto inside = [start](int position) {
      const int at = position - start;
      return at < 0 ? 0 : at < LANES ? at : LANES;
    };
    const uint16_t* next = ahead.k[p] + column * LANES;
    // In the middle what all see; before and behind it, or where there is no such middle, each goes
    // alone, so that no row touches what it may not see.
    const int from = inside(extent.latest), to = inside(extent.shortest);
    const bool middle = from < to;
#pragma GCC unroll 1
    for (int part = middle && !from ? 1 : 0; part < 3; ++part) {
      if (part == 1) {
        if (!middle) break;
        weigh<NQ, C>(v, d, from, to, weights + start, next, sum);
        if (to == LANES) break;
        continue;
      }
#pragma GCC unroll 12
      for (int j = 0; j < NQ; ++j) {
        const int begin = part ? to : inside(queries[j].first);
        const int end = middle && !part ? from : inside(queries[j].live);
        S::F alone[1][C];
        for (int c = 0; c < C; ++c) alone[0][c] = sum[j][c];
        weigh<1, C>(v, d, begin, end, weights + j * SPLIT + start, next, alone);
        for (int c = 0; c < C; ++c) sum[j][c] = alone[0][c];
      }
    }
  }
#pragma GCC unroll 12
  for (int j = 0; j < NQ; ++j)
    for (int c = 0; c < C; ++c)
      S::store(queries[j].partial + LANES + column + c * LANES, sum[j][c]);
}

template <int NQ>
NOINLINE void attend_queries(const KVView& kv, const int32_t* pages, int kv_head,
                             const Ahead& ahead, const Query* queries) {
  const int d = kv.head_dim;
  const size_t head = size_t(kv_head) * d * LANES;
  const S::F scale = S::set1(kv.scale);
  alignas(64) float scores[NQ * SPLIT], q[NQ * QUERY_STRIDE];
  Extent extent;
  for (int j = 0; j < NQ; ++j) {
    extent.add(queries[j]);
    for (int i = 0; i < d; i += LANES)
      S::store(q + j * QUERY_STRIDE + i, S::mul(S::load(queries[j].q + i), scale));
  }
  for (int p = extent.first / LANES; p * LANES < extent.live; ++p) {
    const size_t page = size_t(pages[p]) * kv.page_stride + head;
    score_page<NQ>(kv.k + page, d, q, kv.v + page, scores + p * LANES);
  }
  for (int j = 0; j < NQ; ++j) soften(queries[j], kv.softcap, scores + j * SPLIT);
  // Few queries take several vectors of columns at once, to keep enough sums in flight.
  constexpr int C = NQ <= 6 ? 4 : 2;
  int column = 0;
  for (; column + C * LANES <= d; column += C * LANES)
    weigh_split<NQ, C>(kv, pages, ahead, head, column, scores, queries, extent);
  for (; column < d; column += LANES)
    weigh_split<NQ, 1>(kv, pages, ahead, head, column, scores, queries, extent);
}

// The next split of the same head, else the first seen of the next head, else of the next row.
inline Ahead look_ahead(const KVView& kv, const RowsView& rows, int row, int next_row, int kv_head,
                        int split) {
  int first = (split + 1) * SPLIT_PAGES;
  if (first >= rows.positions[row] / LANES + 1) {
    if (kv_head + 1 < kv.kv_heads) {
      ++kv_head;
    } else if (next_row >= 0) {
      kv_head = 0;
      row = next_row;
    }
    first = kv.first_seen(rows.positions[row]) / SPLIT * SPLIT_PAGES;
  }
  const int num_pages = rows.positions[row] / LANES + 1;
  const int32_t* pages = rows.page_table + size_t(rows.sequences[row]) * rows.table_stride;
  Ahead ahead;
  for (int p = 0; p < SPLIT_PAGES; ++p) {
    const int page = pages[first + p < num_pages ? first + p : first];
    ahead.k[p] = kv.k + size_t(page) * kv.page_stride + size_t(kv_head) * kv.head_dim * LANES;
  }
  return ahead;
}

void attend(const KVView& kv, const RowsView& rows, int row0, int num, int next_row, int kv_head,
            int split, const float* q, int ldq, float* partials) {
  const int group = kv.group(), start = split * SPLIT;
  const size_t width = size_t(kv.head_dim) + LANES;
  const int32_t* pages = rows.page_table + size_t(rows.sequences[row0]) * rows.table_stride +
                         split * SPLIT_PAGES;
  const Ahead ahead = look_ahead(kv, rows, row0 + num - 1, next_row, kv_head, split);
  Query queries[S::max_queries];
  int count = 0;
  const auto flush = [&]() {
    int done = 0;
    const auto take = [&](auto width) {
      constexpr int N = decltype(width)::value;
      if constexpr (N <= S::max_queries)
        for (; done + N <= count; done += N)
          attend_queries<N>(kv, pages, kv_head, ahead, queries + done);
    };
    take(Rows<12>{});
    take(Rows<9>{});
    take(Rows<8>{});
    take(Rows<6>{});
    take(Rows<4>{});
    take(Rows<3>{});
    take(Rows<2>{});
    take(Rows<1>{});
    count = 0;
  };
  for (int r = 0; r < num; ++r) {
    const int position = rows.positions[row0 + r], live = position + 1 - start;
    const int first = kv.first_seen(position) - start;
    if (live <= 0 || first >= SPLIT) continue;
    for (int h = 0; h < group; ++h) {
      const float* head_q = q + size_t(row0 + r) * ldq + size_t(kv_head * group + h) * kv.head_dim;
      queries[count++] = {head_q, partials + (size_t(r) * group + h) * width,
                          first > 0 ? first : 0, live < SPLIT ? live : SPLIT};
      if (count == S::max_queries) flush();
    }
  }
  flush();
}

void fold(float* running, const float* partial, int count, size_t stride, int d) {
  // The factors of up to eight heads take one exponential.
  constexpr int most = LANES / 2;
  for (; count > 0; count -= most, running += stride * most, partial += stride * most) {
    const int heads = count < most ? count : most;
    alignas(64) float factors[LANES] = {};
    for (int h = 0; h < heads; ++h) {
      const float m0 = running[h * stride], m1 = partial[h * stride], m = m0 > m1 ? m0 : m1;
      running[h * stride] = m;
      factors[2 * h] = m0 - m;
      factors[2 * h + 1] = m1 - m;
    }
    S::store(factors, exp_lanes(S::load(factors)));
    for (int h = 0; h < heads; ++h) {
      float* const sum = running + h * stride;
      const float* const term = partial + h * stride;
      sum[1] = sum[1] * factors[2 * h] + term[1] * factors[2 * h + 1];
      const S::F f0 = S::set1(factors[2 * h]), f1 = S::set1(factors[2 * h + 1]);
      for (int c = LANES; c < LANES + d; c += LANES)
        S::store(sum + c, S::fma(S::load(term + c), f1, S::mul(S::load(sum + c), f0)));
    }
  }
}

void finish(const float* running, int d, float* out) {
  const S::F inverse = S::set1(1.0f / running[1]);
  for (int c = 0; c < d; c += LANES) S::store(out + c, S::mul(S::load(running + LANES + c), inverse));
}

Kernels kernel_table(Matmul* matmul) {
  return {
      quantize, matmul,      matmul_dense, embed,  rms_norm, norm_add, gated,
      softcap,  rope_append, rotate,       attend, fold,     finish,   argmax,
  };
}

}  // namespace
