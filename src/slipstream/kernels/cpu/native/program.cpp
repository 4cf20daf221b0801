#include "program.hpp"

#include <algorithm>
#include <limits>

namespace {
constexpr int ALIGN = 16;  // floats
// Writing a KV head to its pages, in query heads: keys of a position lie a line apart.
constexpr int KV_HEAD_COST = 7;
// After a stall the team is tried again this much later, twice as late after each further stall.
constexpr auto LONGEST_ALONE = std::chrono::microseconds(1280000);
}  // namespace

Program::Program(const Kernels* kernels, const SamplingKernels* sampling,
                 std::shared_ptr<Team> team, int max_rows, int max_logits, float* logits,
                 int32_t* argmax, int vocab)
    : kernels_(kernels), sampling_(sampling), team_(std::move(team)), max_rows_(max_rows),
      max_logits_(max_logits), vocab_(vocab), logits_(logits), argmax_(argmax) {}

int Program::add_buffer(Buffer::Kind kind, int width, int rows) {
  width = (width + ALIGN - 1) / ALIGN * ALIGN;
  Memory memory(size_t(rows) * size_t(width) * sizeof(float));
  float* const data = memory.floats();
  buffers_.push_back({kind, width, std::move(memory), data});
  return int(buffers_.size()) - 1;
}

int Program::buffer(int width) { return add_buffer(Buffer::Kind::shared, width, max_rows_); }

float* Program::at(int slot, int row, int member) const {
  const Buffer& buffer = buffers_[size_t(slot)];
  if (buffer.kind == Buffer::Kind::borrowed) row = drafting_.kept_rows[row];
  if (few_ && buffer.kind == Buffer::Kind::own) row += member * ALONE_ROWS;
  return buffer.data + size_t(row) * size_t(buffer.width);
}

Op& Program::add(Op::Kind kind, Source in, int out) {
  ops_.push_back({kind, in, out});
  ops_.back().step = picks_;
  return ops_.back();
}

void Program::embed(std::shared_ptr<Weight> weight, float scale, int out) {
  Op& op = add(Op::Kind::embed, {}, out);
  op.weight = std::move(weight);
  op.scale = scale;
}

void Program::linear(Source in, std::shared_ptr<Weight> weight, const float* bias, int residual,
                     int out) {
  max_k_ = std::max(max_k_, weight->k);
  any_dense_ = any_dense_ || weight->any_dense;
  Op& op = add(Op::Kind::linear, in, out);
  op.weight = std::move(weight);
  op.bias = bias;
  op.residual = residual;
}

void Program::logits(Source in, std::shared_ptr<Weight> weight, float softcap) {
  linear(in, std::move(weight), nullptr, -1, -1);
  ops_.back().kind = Op::Kind::logits;
  ops_.back().softcap = softcap;
}

void Program::norm_add(Source in, int residual, float scale, int width, int out) {
  Op& op = add(Op::Kind::norm_add, in, out);
  op.residual = residual;
  op.scale = scale;
  op.width = width;
}

void Program::rope_append(int qkv, std::shared_ptr<KV> kv, int layer, HeadNorms norms, int out) {
  Op& op = add(Op::Kind::rope_append, {qkv, Prologue::none, nullptr, 0}, out);
  op.kv = std::move(kv);
  op.layer = layer;
  op.norms = norms;
}

void Program::rope(int q, std::shared_ptr<KV> kv, int layer, HeadNorms norms, int heads, bool advance,
                   int out) {
  rope_append(q, std::move(kv), layer, norms, out);
  ops_.back().kind = Op::Kind::rope;
  ops_.back().advance = advance;
  ops_.back().heads = heads;
}

void Program::attention(int q, std::shared_ptr<KV> kv, int layer, int out) {
  rope_append(q, std::move(kv), layer, {}, out);
  ops_.back().kind = Op::Kind::attention;
  lead_to_attention();
}

Program::Range Program::mine(int member, int units) const {
  const int size = team_->active();
  return {int(int64_t(units) * member / size), int(int64_t(units) * (member + 1) / size)};
}

// Cut the live rows into tiles of one sequence and size the scratch memory.
void Program::plan_rows(int num_logits) {
  tiles_.clear();
  max_splits_ = 0;
  for (int r = 0; r < rows_.rows; ++r) {
    if (rows_.positions[r] < 0) continue;
    const int position = rows_.positions[r], splits = position / SPLIT + 1;
    max_splits_ = std::max(max_splits_, splits);
    RowTile* last = tiles_.empty() ? nullptr : &tiles_.back();
    if (last && last->row0 + last->num == r && last->num < TILE_ROWS &&
        rows_.sequences[r] == rows_.sequences[last->row0]) {
      ++last->num;
      last->splits = std::max(last->splits, splits);
      last->lowest = std::min(last->lowest, position);
      last->highest = std::max(last->highest, position);
    } else {
      tiles_.push_back({r, 1, splits, position, position});
    }
  }
  const auto grow = [](Memory& memory, size_t bytes) {
    if (memory.bytes() < bytes) memory = Memory(bytes);
  };
  // A product of few rows keeps a copy for each member; the output product has rows of its own, and
  // so have activated rows, behind the others.
  const auto copies = [&](int rows) {
    if (few_) return size_t(ALONE_ROWS) * size_t(team_->size());
    return size_t(rows) * size_t(rows <= ALONE_ROWS ? team_->size() : 1);
  };
  const size_t most = std::max(copies(rows_.rows), copies(num_logits)), groups = size_t(max_k_ / GROUP);
  activated_ = most * groups;
  grow(acts_, (activated_ + size_t(rows_.rows) * groups) * sizeof(Act));
  if (any_dense_) grow(dense_, most * size_t(max_k_) * sizeof(float));
  size_t floats = 0;
  for (const Op& op : ops_) {
    if (op.kind != Op::Kind::attention) continue;
    const KVView kv = view(op);
    const size_t width = (size_t(kv.head_dim) + LANES) * size_t(kv.heads);
    const size_t whole = width * size_t(team_->size()) * 2 * TILE_ROWS;
    const bool splits = side_by_side(op, team_->size());
    floats = std::max({floats, whole,
                       splits ? width * size_t(rows_.rows) * size_t(span(kv)) : 0});
  }
  grow(partials_, floats * sizeof(float));
  members_.resize(size_t(team_->size()));
  best_.resize(size_t(team_->size()) * size_t(std::max(num_logits, 1)));
}

void Program::run(const RowsView& rows, const int32_t* logit_rows, int num_logits, int share) {
  if (!joined_) join();
  rows_ = rows;
  logit_rows_ = logit_rows;
  num_logits_ = num_logits;
  share_ = share;
  plan_rows(num_logits);
  run_team();
  for (int i = 0; i < num_logits_; ++i) {
    Best top{-std::numeric_limits<float>::infinity(), 0};
    for (int member = 0; member < team_->active(); ++member) {
      const Best& best = best_[size_t(member) * size_t(num_logits_) + size_t(i)];
      if (best.index >= 0 && best.value > top.value) top = best;
    }
    argmax_[i] = top.index;
  }
}

// A team is as slow as its slowest member, and one that has lost its core to another process is ten
// times slower than a single thread. So after two stalls in a row (one alone is a hiccup) steps of
// few rows run alone for a while, then try again; the number of threads never changes a byte.
void Program::run_team() {
  const bool few = rows_.rows <= MAX_SHARE;
  const bool alone = few && Clock::now() < alone_until_;
  team_->run([](void* self, int member) { static_cast<Program*>(self)->work(member); }, this,
             alone ? 1 : team_->size());
  if (!few || alone || team_->size() == 1) return;
  if (team_->stalled()) {
    if (++stalls_ < 2) return;
    alone_until_ = Clock::now() + alone_for_;
    alone_for_ = std::min(2 * alone_for_, LONGEST_ALONE);
  } else {  // forgotten over some fifty good steps, not at the first
    stalls_ = 0;
    alone_for_ = std::max(alone_for_ * 19 / 20, SHORTEST_ALONE);
  }
}

void Program::work(int member) {
  plan_fetch(member);
  for (const Op& op : ops_) {
    if (op.step >= steps_) break;
    switch (op.kind) {
      case Op::Kind::embed: run_embed(op, member); break;
      case Op::Kind::linear: run_matmul(op, member); break;
      case Op::Kind::norm_add: run_norm_add(op, member); break;
      case Op::Kind::rope_append: run_rope_append(op, member); break;
      case Op::Kind::rope: run_rope(op, member); break;
      case Op::Kind::attention: run_attention(op, member); break;
      case Op::Kind::logits:
        if (num_logits_) run_matmul(op, member);
        break;
      case Op::Kind::pick: run_pick(op, member); break;
    }
    if (barrier_after(op)) team_->barrier();
  }
  if (num_logits_) run_argmax(member);
}

void Program::run_embed(const Op& op, int member) {
  const Range range = few_ ? Range{0, rows_.rows} : mine(member, rows_.rows);
  const int32_t* tokens = op.step ? members_[size_t(member)].tokens.data() : rows_.token_ids;
  for (int r = range.begin; r < range.end; ++r)
    kernels_->embed(op.weight->parts[0], tokens[r], op.scale, at(op.out, r, member));
}

// Bring columns of one row, from group0 to group1, into the form that the weights multiply.
void Program::prepare_row(const Source& in, const Weight& weight, int row, int source_row, int rows,
                          int group0, int group1, int member, float* dense, Act* acts) const {
  const float* x = at(in.buffer, source_row, member);
  const int c0 = group0 * GROUP, c1 = std::min(group1 * GROUP, weight.k);
  float* const y = dense;
  if (in.prologue == Prologue::norm) {
    kernels_->rms_norm(x, in.norm_weight, in.eps, weight.k, y);
    x = y;
  } else if (in.prologue == Prologue::gated) {
    kernels_->gated(x + c0, x + weight.k + c0, c1 - c0, in.activation, y + c0);
    x = y;
  } else if (weight.any_dense) {
    std::memcpy(y + c0, x + c0, size_t(c1 - c0) * sizeof(float));
  }
  if (weight.any_quantized)
    kernels_->quantize(x, row, rows, share_, weight.k / GROUP, group0, group1, acts);
}

void Program::run_matmul(const Op& op, int member, const std::vector<Range>* only) {
  const Weight& weight = *op.weight;
  const bool last = op.kind == Op::Kind::logits;
  const int rows = last ? num_logits_ : rows_.rows;
  const int groups = (weight.k + GROUP - 1) / GROUP;
  const bool alone = this->alone(op, rows);
  Act* acts = reinterpret_cast<Act*>(acts_.data());
  float* dense = dense_.floats();
  if (op.activated) {
    acts = activations();
  } else if (alone) {
    acts += size_t(member) * size_t(rows) * size_t(max_k_ / GROUP);
    if (dense) dense += size_t(member) * size_t(rows) * size_t(max_k_);
  }
  thread_local std::vector<float> row_buffer;
  if (row_buffer.size() < size_t(max_k_)) row_buffer.resize(size_t(max_k_));
  const auto prepare = [&](int r, int g0, int g1) {
    float* y = weight.any_dense ? dense + size_t(r) * size_t(max_k_) : row_buffer.data();
    prepare_row(op.in, weight, r, last ? logit_rows_[r] : r, rows, g0, g1, member, y, acts);
  };
  if (op.activated) {
    // The op before has prepared the rows.
  } else if (alone) {
    for (int r = 0; r < rows; ++r) prepare(r, 0, groups);
  } else {
    if (op.in.prologue == Prologue::norm) {
      const Range range = mine(member, rows);
      for (int r = range.begin; r < range.end; ++r) prepare(r, 0, groups);
    } else {
      const Range range = mine(member, rows * groups);
      for (int unit = range.begin; unit < range.end;) {
        const int r = unit / groups, g0 = unit % groups;
        const int g1 = std::min(groups, g0 + range.end - unit);
        prepare(r, g0, g1);
        unit += g1 - g0;
      }
    }
    team_->barrier();
  }
  const bool adds = op.residual >= 0;
  const Output to{last ? logits_ : at(op.out, 0, member), last ? vocab_ : width(op.out), op.bias,
                  adds ? at(op.residual, 0, member) : nullptr, adds ? width(op.residual) : 0};
  Fetch& fetch = fetch_for(op, member);
  int first = 0, column = 0;
  for (const Matrix& part : weight.parts) {
    const Range own = share_of(op, part, first, member);
    const Range* const ranges = only ? only->data() : &own;
    const size_t num = only ? only->size() : own.begin < own.end;
    for (size_t i = 0; i < num; ++i) {
      const auto [begin, end] = ranges[i];
      const Output its = to.at(0, column);
      if (part.quantized())
        kernels_->matmul_quantized(part, acts, rows, share_, begin, end, its, fetch);
      else
        kernels_->matmul_dense(part, dense, max_k_, rows, share_, begin, end, its);
      const int n0 = begin * LANES, n1 = std::min(end * LANES, part.n);
      for (int r = 0; r < rows && op.softcap > 0; ++r)
        kernels_->softcap(its.at(r, n0).out, n1 - n0, op.softcap);
    }
    first += part.tiles();
    column += part.n;
  }
  if (op.activates) activate(op, member);
}

void Program::run_norm_add(const Op& op, int member) {
  const Range range = mine(member, rows_.rows);
  for (int r = range.begin; r < range.end; ++r)
    kernels_->norm_add(at(op.residual, r, member), at(op.in.buffer, r, member), op.in.norm_weight,
                       op.in.eps, op.scale, op.width, at(op.out, r, member));
}

// Units are heads, each with all rows: rows of one sequence write the same lines of a page, which must be
// one member's. A KV head costs several query heads. Of many rows only few share lines across the cut
// between two members, and each takes whole rows.
void Program::run_rope_append(const Op& op, int member) {
  const KVView kv = op.kv->view(op.layer);
  if (rows_.rows > MAX_SHARE) {
    const Range range = mine(member, rows_.rows);
    for (int r = range.begin; r < range.end; ++r)
      kernels_->rope_append(kv, op.norms, rows_, r, 0, kv.heads + kv.kv_heads,
                            at(op.in.buffer, r, member), at(op.out, r, member));
    return;
  }
  const int cost = kv.heads + kv.kv_heads * KV_HEAD_COST;
  const auto unit_at = [&](int point) {  // the first whose middle is not before the point
    if (point <= kv.heads) return point;
    return kv.heads + (point - kv.heads + KV_HEAD_COST / 2) / KV_HEAD_COST;
  };
  const Range range = mine(member, cost);
  const int begin = unit_at(range.begin), end = unit_at(range.end);
  for (int r = 0; r < rows_.rows && begin < end; ++r)
    kernels_->rope_append(kv, op.norms, rows_, r, begin, end, at(op.in.buffer, r, member),
                          at(op.out, r, member));
}

void Program::run_rope(const Op& op, int member) {
  const KVView kv = view(op);
  const Range range = few_ ? Range{0, rows_.rows * kv.heads} : mine(member, rows_.rows * kv.heads);
  // A draft's view has the position of the last key; the anchor's comes next.
  const int ahead = drafts_ ? 1 + (op.advance ? op.step : 0) : 0;
  for (int unit = range.begin; unit < range.end; ++unit) {
    const int r = unit / kv.heads, column = unit % kv.heads * kv.head_dim;
    if (rows_.positions[r] < 0) continue;
    kernels_->rotate(kv, op.norms, rows_.positions[r] + ahead, at(op.in.buffer, r, member) + column,
                     at(op.out, r, member) + column);
  }
}

void Program::run_argmax(int member) {
  const Range range = mine(member, vocab_ / ALIGN);
  const int n0 = range.begin * ALIGN;
  const int n1 = member + 1 == team_->active() ? vocab_ : range.end * ALIGN;
  for (int i = 0; i < num_logits_; ++i) {
    const float* row = logits_ + size_t(i) * size_t(vocab_);
    Best& best = best_[size_t(member) * size_t(num_logits_) + size_t(i)];
    best.index = n0 < n1 ? kernels_->argmax(row, n0, n1) : -1;
    if (best.index >= 0) best.value = row[best.index];
  }
}

size_t Program::scratch_bytes() const {
  size_t total = acts_.bytes() + dense_.bytes() + partials_.bytes();
  for (const Buffer& buffer : buffers_) total += buffer.memory.bytes();
  return total;
}
