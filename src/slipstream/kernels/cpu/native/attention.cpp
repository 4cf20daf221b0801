// Attention of a recorded forward: how rows, heads and splits are dealt to the team.
//
// With few rows the splits run side by side and are folded afterwards; with many, a member takes tiles
// of rows through all their splits and folds as it goes. Both fold the same values in the same order.
// Splits wholly outside a row's window do not exist for it.
#include "program.hpp"

#include <algorithm>

namespace {
// Splits that every member of a draft folds for itself: about a microsecond for nine heads of 64.
constexpr int OWN_SPLITS = 8;
}  // namespace

bool Program::folds_for_itself() const { return max_splits_ <= OWN_SPLITS; }

// Whether so few tiles of rows are live that the splits must run side by side to occupy `members`.
bool Program::side_by_side(const Op& op, int members) const {
  return few_ || int(tiles_.size()) * view(op).kv_heads < 4 * members;
}

int Program::first_split(const KVView& kv, int position) const {
  return kv.first_seen(position) / SPLIT;
}

// Splits that the rows of a tile see at most. A row's partials lie in that many places, its split s in
// place s % span.
int Program::span(const KVView& kv) const {
  if (!kv.window) return max_splits_;
  int most = 0;
  for (const RowTile& tile : tiles_)
    most = std::max(most, tile.splits - first_split(kv, tile.lowest));
  return most;
}

void Program::run_attention(const Op& op, int member) {
  const KVView kv = view(op);
  if (!side_by_side(op, team_->active())) return attend_whole(op, member);
  const int d = kv.head_dim, group = kv.group(), span = this->span(kv);
  const size_t size = size_t(d) + LANES, row_stride = size * size_t(group);
  const size_t split_stride = row_stride * size_t(rows_.rows);
  const size_t kv_stride = split_stride * size_t(span);
  // By head, then split: tiles of one split go one after the other, and rows of unlike number are dealt
  // evenly.
  const int tiles = int(tiles_.size());
  const Range range = mine(member, kv.kv_heads * span * tiles);
  for (int unit = range.begin; unit < range.end; ++unit) {
    const int index = unit % tiles, head = unit / tiles / span;
    const RowTile& tile = tiles_[size_t(index)];
    const int split = first_split(kv, tile.lowest) + unit / tiles % span;
    if (split >= tile.splits) continue;
    float* partials = partials_.floats() + size_t(head) * kv_stride +
                      size_t(split % span) * split_stride + size_t(tile.row0) * row_stride;
    kernels_->attend(kv, rows_, tile.row0, tile.num, next_row(index, 1), head, split,
                     at(op.in.buffer, 0, member), width(op.in.buffer), partials);
  }
  team_->barrier();
  if (few_ && folds_for_itself()) return fold_for_itself(op, member);
  // By KV head, as the splits were dealt: most of what a member folds is its own. Rows that see the same
  // splits are folded together.
  const int per_head = rows_.rows * group;
  const auto splits_of = [&](int r) {
    return Range{first_split(kv, rows_.positions[r]), rows_.positions[r] / SPLIT + 1};
  };
  const Range folds = mine(member, kv.kv_heads * per_head);
  for (int unit = folds.begin, count; unit < folds.end; unit += count) {
    const int head = unit / per_head, within = unit % per_head, r = within / group;
    count = group - within % group;
    if (rows_.positions[r] < 0) continue;
    const Range splits = splits_of(r);
    for (int next = r + 1; next < rows_.rows && rows_.positions[next] >= 0; ++next) {
      const Range its = splits_of(next);
      if (its.begin != splits.begin || its.end != splits.end) break;
      count += group;
    }
    count = std::min(count, folds.end - unit);
    float* const places = partials_.floats() + size_t(head) * kv_stride + size_t(within) * size;
    float* const running = places + size_t(splits.begin % span) * split_stride;
    for (int s = splits.begin + 1; s < splits.end; ++s)
      kernels_->fold(running, places + size_t(s % span) * split_stride, count, size, d);
    for (int i = 0; i < count; ++i) {
      const int row = (within + i) / group, column = head * group + (within + i) % group;
      for (int copy = 0; copy < (few_ ? team_->active() : 1); ++copy)
        kernels_->finish(running + size_t(i) * size, d,
                         at(op.out, row, copy) + size_t(column) * size_t(d));
    }
  }
}

// Splits that lie side by side, folded into the member's own copy in their order.
void Program::fold_for_itself(const Op& op, int member) {
  const KVView kv = view(op);
  const int d = kv.head_dim, group = kv.group(), span = this->span(kv);
  const size_t size = size_t(d) + LANES, row_stride = size * size_t(group);
  const size_t split_stride = row_stride * size_t(rows_.rows);
  thread_local std::vector<float> running;
  if (running.size() < row_stride) running.resize(row_stride);
  for (int r = 0; r < rows_.rows; ++r)
    for (int head = 0; head < kv.kv_heads; ++head) {
      const float* const places = partials_.floats() +
                                  size_t(head) * split_stride * size_t(span) +
                                  size_t(r) * row_stride;
      const int first = first_split(kv, rows_.positions[r]), end = rows_.positions[r] / SPLIT + 1;
      const float* const from = places + size_t(first % span) * split_stride;
      std::copy(from, from + row_stride, running.begin());
      for (int s = first + 1; s < end; ++s)
        kernels_->fold(running.data(), places + size_t(s % span) * split_stride, group, size, d);
      for (int h = 0; h < group; ++h)
        kernels_->finish(running.data() + size_t(h) * size, d,
                         at(op.out, r, member) + size_t(head * group + h) * size_t(d));
    }
}

// First row of the tile `stride` behind, -1 if there is none.
int Program::next_row(int tile, int stride) const {
  const size_t next = size_t(tile + stride);
  return next < tiles_.size() ? tiles_[next].row0 : -1;
}

// A prompt's later tiles see more than its first ones, so many tiles are dealt in turn.
bool Program::whole_tiles() const { return int(tiles_.size()) >= 4 * team_->active(); }

// Many rows: a member takes tiles of rows through all their heads and splits; few tiles are cut in
// equal parts, heads apart.
void Program::attend_whole(const Op& op, int member) {
  const KVView kv = view(op);
  const int heads = kv.kv_heads, size = team_->active(), tiles = int(tiles_.size());
  const size_t width = size_t(kv.head_dim) + LANES;
  const size_t block = width * size_t(kv.group()) * TILE_ROWS;
  float* const running = partials_.floats() + size_t(member) * 2 * block;
  if (whole_tiles()) {
    for (int tile = member; tile < tiles; tile += size)
      for (int head = 0; head < heads; ++head)
        attend_tile(op, tile, head, next_row(tile, size), running);
    return;
  }
  const Range range = mine(member, tiles * heads);
  for (int unit = range.begin; unit < range.end; ++unit)
    attend_tile(op, unit / heads, unit % heads, next_row(unit / heads, 1), running);
}

// One tile of rows with one KV head, folded split by split; scratch of two blocks at `running`.
void Program::attend_tile(const Op& op, int index, int head, int next_row, float* running) {
  const KVView kv = view(op);
  const RowTile& tile = tiles_[size_t(index)];
  const int d = kv.head_dim, group = kv.group();
  const size_t size = size_t(d) + LANES, block = size * size_t(group);
  float* const partials = running + block * TILE_ROWS;
  const int first = first_split(kv, tile.lowest);
  // All rows begin with the tile's first split, unless a window lets some begin later.
  const bool together = !kv.window || first_split(kv, tile.highest) == first;
  for (int split = first; split < tile.splits; ++split) {
    const bool begins = together && split == first;
    kernels_->attend(kv, rows_, tile.row0, tile.num, next_row, head, split,
                     at(op.in.buffer, 0, 0), width(op.in.buffer), begins ? running : partials);
    if (begins) continue;
    for (int r = 0; r < tile.num; ++r) {
      const int position = rows_.positions[tile.row0 + r], own = first_split(kv, position);
      float* const sum = running + size_t(r) * block;
      const float* const term = partials + size_t(r) * block;
      if (split > position / SPLIT || split < own) continue;
      if (split == own)
        std::copy(term, term + block, sum);
      else
        kernels_->fold(sum, term, group, size, d);
    }
  }
  for (int i = 0; i < tile.num * group; ++i)
    kernels_->finish(running + size_t(i) * size, d,
                     at(op.out, tile.row0 + i / group, 0) +
                         size_t(head * group + i % group) * size_t(d));
}
