// What a member goes on with that it has computed itself, so that nobody waits and no line of a cache
// changes owner: a gated activation behind its product, and in drafts products behind products.
#include "program.hpp"

#include <algorithm>

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

// The tiles of a part that a member computes; `first` tiles of the weight come before it. Of gate and
// up it takes the same columns, in whole groups.
Program::Range Program::share_of(const Op& op, const Matrix& part, int first, int member) const {
  if (op.activates) {
    const int per_group = GROUP / LANES;
    const Range groups = mine(member, part.n / GROUP);
    return {groups.begin * per_group, groups.end * per_group};
  }
  const Range range = mine(member, op.weight->tiles);
  return {std::max(range.begin - first, 0), std::min(range.end - first, part.tiles())};
}

// Rounded activations that all members read, behind those of other products.
Act* Program::activations() const { return reinterpret_cast<Act*>(acts_.data()) + activated_; }

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
