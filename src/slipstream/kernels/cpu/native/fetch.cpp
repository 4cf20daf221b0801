// KV asked for while products compute: what is asked for, by whom and how fast.
//
// The pages of a layer come from memory, a jump apart, and an attention over several sequences
// spends half its time waiting for them. The products before it have memory to spare as soon as
// they compute longer than they read, so each asks for a few lines of KV with every group. Only
// asking is done here: no result depends on it.
#include <algorithm>

#include "program.hpp"

namespace {
// Products of fewer rows wait for memory themselves; of more, an attention computes long enough.
constexpr int FEWEST_ROWS = 4, MOST_ROWS = 64;
// Of one layer and member: what a second-level cache of 1 MB keeps beside the weights passing.
constexpr size_t MOST_BYTES = 768 * 1024;
constexpr size_t MOST_LINES = 4;  // a group: more would keep the weights waiting
}  // namespace

// Tell the products since the last attention that this one, just recorded, comes next.
void Program::lead_to_attention() {
  const int attention = int(ops_.size()) - 1;
  int blocks = 0;
  for (int i = attention - 1; i >= 0 && ops_[size_t(i)].kind != Op::Kind::attention; --i) {
    Op& op = ops_[size_t(i)];
    if (op.kind != Op::Kind::linear) continue;
    blocks += op.weight->tiles * (op.weight->k / GROUP);
    op.attention = attention;
    op.blocks_left = blocks;
  }
}

// The tiles of rows that a member takes in `attend_whole`, or has the first head of.
Program::Turns Program::tiles_of(const Op& op, int member) const {
  const int tiles = int(tiles_.size()), heads = view(op).kv_heads;
  if (whole_tiles()) return {member, tiles, team_->active()};
  const Range units = mine(member, tiles * heads);
  return {(units.begin + heads - 1) / heads, (units.end + heads - 1) / heads, 1};
}

// List the pages that a member's attentions will read in this step, in order.
void Program::plan_fetch(int member) {
  std::vector<int32_t>& own = members_[size_t(member)].pages;
  own.clear();
  members_[size_t(member)].fetch = Fetch();
  const auto reads = [](const Op& op) { return op.kind == Op::Kind::attention; };
  const auto op = std::find_if(ops_.begin(), ops_.end(), reads);
  if (op == ops_.end() || rows_.rows < FEWEST_ROWS || rows_.rows > MOST_ROWS) return;
  if (side_by_side(*op, team_->active())) return;
  const size_t most = MOST_BYTES / (2 * op->kv->plane(op->layer) * sizeof(uint16_t));
  int sequence = -1;
  const Turns turns = tiles_of(*op, member);
  for (int index = turns.first; index < turns.end; index += turns.stride) {
    const RowTile& tile = tiles_[size_t(index)];
    if (rows_.sequences[tile.row0] == sequence) continue;
    sequence = rows_.sequences[tile.row0];
    const int32_t* pages = rows_.page_table + size_t(sequence) * size_t(rows_.table_stride);
    const size_t live = size_t(rows_.positions[tile.row0] / LANES) + 1;
    own.insert(own.end(), pages, pages + std::min(live, most - own.size()));
  }
}

// What a member asks for during a product: its share of what is left for the attention to come.
Fetch& Program::fetch_for(const Op& op, int member) {
  Member& own = members_[size_t(member)];
  Fetch& fetch = own.fetch;
  fetch.lines = 0;
  // The first draft step has brought the head's weights into the caches.
  fetch.cached = few_ && op.step > 0;
  if (op.attention < 0 || own.pages.empty()) return fetch;
  const Op& reader = ops_[size_t(op.attention)];
  const KVView kv = reader.kv->view(reader.layer);
  if (kv.window && max_splits_ * SPLIT > kv.window) return fetch;  // the pages listed are not its own
  const uint8_t* const layer = reinterpret_cast<const uint8_t*>(kv.k);
  if (fetch.layer != layer)
    fetch = {fetch.cached, own.pages.data(), int(own.pages.size()), layer, kv.page_stride * sizeof(uint16_t),
             2 * reader.kv->plane(reader.layer) * sizeof(uint16_t)};
  const size_t lines = size_t(fetch.num_pages - fetch.page) * fetch.part / 64;
  const size_t blocks = size_t(op.blocks_left / team_->active()) + 1;
  fetch.lines = int(std::min((lines + blocks - 1) / blocks, MOST_LINES));
  return fetch;
}
