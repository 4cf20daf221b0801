// Drafts: what a program of k unrolled draft steps does besides the ops of a target's forward.
//
// A draft step of one sequence is 17 small ops of a few microseconds, so with few rows a barrier costs
// as much as an op. There members rather do the same small work each for itself (embedding, rotation,
// folding of a short context), into copies of their own, and products that hand on only what the same
// member goes on with need no barrier between them. None of it changes an operation or its order.
#include "program.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {
// Splits that every member folds for itself: about a microsecond for nine heads of 64.
constexpr int OWN_SPLITS = 8;

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

// Find what follows what without a barrier; once, when all is recorded.
void Program::join() {
  const auto is_product = [](const Op& op) {
    return op.kind == Op::Kind::linear || op.kind == Op::Kind::pick;
  };
  joined_ = true;
  size_t first = 0;  // of the products since the last barrier
  for (size_t i = 1; i < ops_.size(); ++i) {
    Op& before = ops_[i - 1];
    Op& op = ops_[i];
    const bool gated = op.in.prologue == Prologue::gated;
    // A product's output that only its residual reads stays with the member that computes it.
    const auto apart = [&](const Op& other) {
      return is_product(other) && op.in.buffer != other.out && op.out != other.in.buffer &&
             op.clusters.scores != other.out;
    };
    const bool joins = before.kind == Op::Kind::linear && is_product(op) && !gated &&
                       before.in.prologue != Prologue::gated &&
                       std::all_of(ops_.begin() + long(first), ops_.begin() + long(i), apart);
    before.joined = joins;
    if (!joins) first = i;
    // Gate and up, activated by the member that has both, and rounded for the product behind.
    const bool whole = before.weight && before.weight->parts.size() == 2 &&
                       before.weight->parts[0].n == before.weight->parts[1].n &&
                       before.weight->parts[0].n % GROUP == 0;
    op.activated = gated && before.kind == Op::Kind::linear && op.in.buffer == before.out && whole &&
                   !op.weight->any_dense;
    before.activates = op.activated;
    before.activation = op.in.activation;
  }
}

bool Program::barrier_after(const Op& op) const {
  if (op.kind == Op::Kind::pick) return false;  // it ends behind one of its own
  if (!few_) return true;
  switch (op.kind) {
    case Op::Kind::embed:
    case Op::Kind::rope: return false;
    case Op::Kind::attention: return !folds_for_itself();
    default: return !op.joined;
  }
}

// Whether every member prepares a product's rows for itself.
bool Program::alone(const Op& op, int rows) const {
  return rows <= ALONE_ROWS && op.in.prologue != Prologue::gated;
}

bool Program::folds_for_itself() const { return max_splits_ <= OWN_SPLITS; }

KVView Program::view(const Op& op) const {
  KVView view = op.kv->view(op.layer);
  if (op.heads) view.heads = op.heads;
  if (op.window >= 0) view.window = op.window;
  return view;
}

// The tiles of a part that a member computes; `first` tiles of the weight come before it. Of gate and
// up it takes the same columns, in whole groups.
Program::Range Program::share_of(const Op& op, const Matrix& part, int first, int member) const {
  if (few_ && op.activates) {
    const int per_group = GROUP / LANES;
    const Range groups = mine(member, part.n / GROUP);
    return {groups.begin * per_group, groups.end * per_group};
  }
  const Range range = mine(member, op.weight->tiles);
  return {std::max(range.begin - first, 0), std::min(range.end - first, part.tiles())};
}

// Rounded activations that all members read, behind those that each has for itself.
Act* Program::activations() const {
  const size_t copies = size_t(ALONE_ROWS) * size_t(team_->size());
  return reinterpret_cast<Act*>(acts_.data()) + copies * size_t(max_k_ / GROUP);
}

void Program::activate(const Op& op, int member) {
  const Matrix& gate = op.weight->parts[0];
  const Range groups = mine(member, gate.n / GROUP);
  const int c0 = groups.begin * GROUP, count = (groups.end - groups.begin) * GROUP;
  thread_local std::vector<float> y;
  if (y.size() < size_t(gate.n)) y.resize(size_t(gate.n));
  for (int r = 0; r < rows_.rows; ++r) {
    const float* x = at(op.out, r, member);
    kernels_->gated(x + c0, x + gate.n + c0, count, op.activation, y.data() + c0);
    kernels_->quantize(y.data(), r, rows_.rows, share_, gate.n / GROUP, groups.begin, groups.end,
                       activations());
  }
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
