// Drafts: what a program of k unrolled draft steps does besides the ops of a target's forward.
//
// A draft step of one sequence is 17 small ops of a few microseconds, so with few rows a barrier costs
// as much as an op. There members rather do the same small work each for itself (embedding, rotation,
// folding of a short context), into copies of their own. None of it changes an operation or its order.
#include "program.hpp"

#include <algorithm>
#include <limits>

namespace {
// The tiles of each cluster, if the tokens of all follow one another in as many whole tiles.
int tiles_of_each(const Clusters& clusters, int tokens) {
  const int each = tokens / clusters.count;
  if (each * clusters.count != tokens || each % LANES) return 0;
  for (int i = 0; i < tokens; ++i)
    if ((*clusters.members)[size_t(i)] != i / each) return 0;
  return each / LANES;
}
}  // namespace

int Program::own_buffer(int width) {
  return add_buffer(Buffer::Kind::own, width, std::max(max_rows_, team_->size() * ALONE_ROWS));
}

int Program::borrow(const Program& target, int buffer) {
  const Buffer& from = target.buffers_[size_t(buffer)];
  buffers_.push_back({Buffer::Kind::borrowed, from.width, Memory(), from.data});
  return int(buffers_.size()) - 1;
}

void Program::attend_before(int q, std::shared_ptr<KV> kv, int layer, int heads, int window,
                            int out) {
  rope_append(q, std::move(kv), layer, {}, out);
  ops_.back().kind = Op::Kind::attention;
  ops_.back().window = window;
  ops_.back().heads = heads;
}

void Program::pick(Source in, std::shared_ptr<Weight> weight, std::vector<int32_t> ids,
                   Clusters clusters, int out) {
  if (clusters.scores >= 0) clusters.tiles = tiles_of_each(clusters, int(ids.size()));
  if (weight->parts.size() != 1) clusters.tiles = 0;
  linear(in, std::move(weight), nullptr, -1, out);
  ids.resize((ids.size() + LANES - 1) / LANES * LANES);  // kernels read whole vectors
  ops_.back().kind = Op::Kind::pick;
  ops_.back().clusters = std::move(clusters);
  ops_.back().ids = std::make_shared<const std::vector<int32_t>>(std::move(ids));
  ++picks_;
  drafts_ = true;
}

void Program::run_draft(const RowsView& rows, const Drafting& drafting, int share) {
  if (!joined_) join();
  rows_ = rows;
  drafting_ = drafting;
  num_logits_ = 0;
  share_ = share;
  steps_ = drafting.k;
  few_ = rows.rows <= ALONE_ROWS;
  plan_rows(rows.rows);
  for (Member& member : members_) member.tokens.resize(size_t(rows.rows));
  run_team();
}

KVView Program::view(const Op& op) const {
  KVView view = op.kv->view(op.layer);
  if (op.heads) view.heads = op.heads;
  if (op.window >= 0) view.window = op.window;
  return view;
}

// Find each row's best clusters, which every member does for itself: the largest scores, the first of
// equals before the others. A NaN is as good as the lowest score.
void Program::find_best_clusters(const Op& op, int member) {
  constexpr float LOWEST = -std::numeric_limits<float>::infinity();
  const int count = op.clusters.count;
  Member& own = members_[size_t(member)];
  own.is_best.assign(size_t(rows_.rows) * size_t(count), 0);
  own.scores.resize(size_t(count));
  for (int r = 0; r < rows_.rows; ++r) {
    const float* const from = at(op.clusters.scores, r, member);
    std::copy(from, from + count, own.scores.begin());
    uint8_t* const is_best = own.is_best.data() + size_t(r) * size_t(count);
    int found = 0;
    for (; found < op.clusters.top; ++found) {
      const int best = kernels_->argmax(own.scores.data(), 0, count);
      if (!(own.scores[size_t(best)] > LOWEST)) break;
      own.scores[size_t(best)] = LOWEST;
      is_best[best] = 1;
    }
    for (int i = 0; found < op.clusters.top; ++i)  // all that is left is as low as can be
      if (!is_best[i]) is_best[i] = 1, ++found;
  }
}

// Put the logits [n0, n1) of tokens out of the race whose clusters are not among the row's best.
void Program::leave_best_clusters(const Op& op, int member, int row, int n0, int n1) const {
  const uint8_t* const is_best =
      members_[size_t(member)].is_best.data() + size_t(row) * size_t(op.clusters.count);
  float* logits = at(op.out, row, member);
  const int32_t* members = op.clusters.members->data();
  for (int n = n0; n < n1; ++n)
    if (!is_best[members[n]]) logits[n] = -std::numeric_limits<float>::infinity();
}

// Share out the tiles of the clusters that any row looks into.
void Program::take_tiles(const Op& op, int member) {
  Member& own = members_[size_t(member)];
  const int count = op.clusters.count, tiles = op.clusters.tiles;
  own.wanted.clear();
  for (int c = 0; c < count; ++c) {
    bool is_wanted = false;
    for (int r = 0; r < rows_.rows; ++r)
      is_wanted |= own.is_best[size_t(r) * size_t(count) + size_t(c)] != 0;
    if (is_wanted) own.wanted.push_back(c);
  }
  own.ranges.clear();
  const Range units = mine(member, int(own.wanted.size()) * tiles);
  for (int unit = units.begin; unit < units.end;) {
    const int within = unit % tiles, taken = std::min(tiles - within, units.end - unit);
    const int begin = own.wanted[size_t(unit / tiles)] * tiles + within;
    own.ranges.push_back({begin, begin + taken});
    unit += taken;
  }
}

// The best of a row's tokens [n0, n1).
Program::Best Program::best_of(const Op& op, int member, int row, int n0, int n1) const {
  const float* logits = at(op.out, row, member);
  Best best{-std::numeric_limits<float>::infinity(), -1};
  if (drafting_.temperatures[row] > 0) {
    const NoiseKey key{drafting_.seeds[row], uint32_t(rows_.positions[row] + 2 + op.step),
                       drafting_.choices[row], 0};
    best.index = sampling_->race_ids(logits, op.ids->data(), n0, n1, drafting_.temperatures[row],
                                     key, best.value);
  } else {
    best.index = kernels_->argmax(logits, n0, n1);
    best.value = logits[best.index];
  }
  return best;
}

// Logits, the best of each member's own columns, and of those the best, which every member finds for
// itself. The first of equals wins.
void Program::run_pick(const Op& op, int member) {
  const bool clustered = op.clusters.scores >= 0, apart = op.clusters.tiles > 0;
  Member& own = members_[size_t(member)];
  if (clustered) find_best_clusters(op, member);
  if (apart) {
    take_tiles(op, member);
  } else {
    own.ranges.assign(1, mine(member, op.weight->tiles));
  }
  run_matmul(op, member, apart ? &own.ranges : nullptr);
  const int32_t* ids = op.ids->data();
  constexpr float LOWEST = -std::numeric_limits<float>::infinity();
  for (int r = 0; r < rows_.rows; ++r) {
    Best& best = best_[size_t(member) * size_t(rows_.rows) + size_t(r)];
    best = {LOWEST, -1};
    for (const Range& tiles : own.ranges) {
      const int n0 = tiles.begin * LANES, n1 = std::min(tiles.end * LANES, op.weight->n);
      if (n0 >= n1) continue;
      if (clustered) leave_best_clusters(op, member, r, n0, n1);
      const Best found = best_of(op, member, r, n0, n1);
      if (best.index < 0 || (found.index >= 0 && found.value > best.value)) best = found;
    }
  }
  team_->barrier();
  for (int r = 0; r < rows_.rows; ++r) {
    Best top{LOWEST, 0};
    for (int other = 0; other < team_->active(); ++other) {
      const Best& best = best_[size_t(other) * size_t(rows_.rows) + size_t(r)];
      if (best.index >= 0 && best.value > top.value) top = best;
    }
    members_[size_t(member)].tokens[size_t(r)] = ids[top.index];
    if (member == 0) drafting_.drafted[op.step * rows_.rows + r] = ids[top.index];
  }
}
