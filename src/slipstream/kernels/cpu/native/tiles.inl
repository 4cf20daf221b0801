// Products over many tiles: which go side by side, in which order, and what is asked of memory.
#pragma once

#include "linear.inl"

namespace {

// How far ahead of its use a weight is asked for, where several tiles are read side by side.
constexpr size_t TILES_AHEAD = 8192;
constexpr int FEWEST_PAIRED = 3;  // rows

// Whether tiles of a kind can go side by side.
template <class K>
constexpr bool SIDE_BY_SIDE = S::tile_rows > 0 && (K::BITS == 4 || K::BITS == 8) && K::GROUPS == 1;

// tile_product of R rows and T whole tiles: what is read of the rows serves all tiles, and sums of more
// chains hide latency. The same integers and sums, in the same order. V is S, named only where it can.
template <class K, int R, int T, class V = S>
NOINLINE void tiles_product(const Matrix& m, const uint8_t* tiles, const Act* acts, int stride,
                            const Output& to, const uint8_t* fetch, int fetch_lines) {
  const K kind(m);
  const size_t codes = size_t(K::CODES) * size_t(kind.blocks), bytes = kind.unit_bytes();
  const size_t tile_bytes = m.tile_bytes();
  S::F sum[T * R];
#pragma GCC unroll 16
  for (int j = 0; j < T * R; ++j) sum[j] = S::zero();
  // Where the sums go, other members have read.
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) V::prefetch_to_write(to.at(r, t * LANES).out);
  // A tile is followed by what its neighbours have read: beyond its end the next one of its turn is
  // asked for.
  const uint8_t* const end = tiles + tile_bytes;
  const uint8_t* const turn = tile_bytes > TILES_AHEAD ? end - TILES_AHEAD : tiles;
  for (const uint8_t* unit = tiles; unit != end; unit += bytes) {
    const size_t ahead = TILES_AHEAD + (unit < turn ? 0 : (T - 1) * tile_bytes);
    const auto ask = [&](const uint8_t* from, size_t begin, size_t end) {
      if (T > 2) return;  // caches hold the weights
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t)
        for (size_t i = begin; i < end; i += 64) S::prefetch(from + size_t(t) * tile_bytes + ahead + i);
    };
    ask(unit, codes, bytes);
    const uint8_t* block = unit;
    for (int b = 0; b < kind.blocks; ++b, block += K::CODES, acts += stride) {
      ask(block, 0, K::CODES);
      for (int i = 0; i < fetch_lines; ++i, fetch += 64) S::prefetch(fetch);
      int32_t start[R];
      for (int r = 0; r < R; ++r) start[r] = start_of(kind, acts[r], 0);
      S::I dot[T * R];
      V::template tile_dots<R, T, K::BITS, int(sizeof(Act))>(start, block, tile_bytes, acts->q, dot);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const UnitNumbers<K> numbers(kind, unit + size_t(t) * tile_bytes + codes);
        const S::F scale = numbers.scale(kind.group_of(b));
        const S::F bias = K::BIAS ? numbers.bias(kind.group_of(b)) : S::zero();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          add_dot<K>(dot[t * R + r], scale, bias, acts[r], sum[t * R + r]);
      }
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store_row(sum[t * R + r], to.at(0, t * LANES), r, LANES);
}

// tiles_product for any number of rows; the KV asked for on the way goes with the first.
template <class K, int T>
NOINLINE void tiles_block(const Matrix& m, const uint8_t* tiles, const Act* acts, int rows,
                          const Output& to, const uint8_t* fetch, int fetch_lines) {
  int r = 0;
  const auto call = [&](auto width) {
    constexpr int N = decltype(width)::value;
    tiles_product<K, N, T>(m, tiles, acts + r, rows, to.at(r, 0), fetch, fetch_lines);
    r += N;
    fetch_lines = 0;
  };
  if constexpr (T == 2) {
    while (rows - r >= S::tile_rows) call(Rows<S::tile_rows>{});
    switch (rows - r) {
      case 7: return call(Rows<7>{});
      case 6: return call(Rows<6>{});
      case 5: return call(Rows<5>{});
      case 4: return call(Rows<4>{});
      case 3: return call(Rows<3>{});
    }
  }
  if (rows - r == 2) call(Rows<2>{});
  if (rows - r == 1) call(Rows<1>{});
}

// Tiles outside, row blocks inside: tiles stay in the first caches over all blocks. One row a block
// (share 1) is the other way round: every row reads all the weights again.
//
// Three rows and more compute longer over their weights than memory needs, so tiles go in pairs; one or
// two wait for memory, and go in fours where caches hold the weights.
template <class K>
void matmul_tiles(const Matrix& m, const Act* acts, int rows, int share, int tile0, int tile1,
                  const Output& to, Fetch& fetch) {
  const int groups = m.k / GROUP, blocks = (rows + share - 1) / share;
  const int whole = m.n / LANES < tile1 ? m.n / LANES : tile1;
  const bool few = rows_in_block(rows, 0, share) < FEWEST_PAIRED;
  const int most = !SIDE_BY_SIDE<K> ? 1 : !few ? 2 : fetch.cached ? 4 : 1;
  const auto multiply = [&](int tile, int count, int block) {
    const int r0 = block * share, num = rows_in_block(rows, block, share);
    const uint8_t* const weights = m.data + size_t(tile) * m.tile_bytes();
    const uint8_t* const fetched = fetch.take(groups * count);
    const int lines = fetched ? fetch.lines * count : 0;
    const Act* const its = acts + size_t(r0) * groups;
    const Output out = to.at(r0, tile * LANES);
    if constexpr (SIDE_BY_SIDE<K>) {
      if (count == 4) return tiles_block<K, 4>(m, weights, its, num, out, fetched, lines);
      if (count == 2) return tiles_block<K, 2>(m, weights, its, num, out, fetched, lines);
    }
    block_product<K>(m, weights, its, num, out, live_lanes(m, tile), fetched, lines);
  };
  const auto over_tiles = [&](int block0, int block1) {
    for (int tile = tile0, count; tile < tile1; tile += count) {
      count = tile + most <= whole ? most : 1;
      for (int block = block0; block < block1; ++block) multiply(tile, count, block);
    }
  };
  if (share > 1) return over_tiles(0, blocks);
  for (int block = 0; block < blocks; ++block) over_tiles(block, block + 1);
}

}  // namespace
