// A recorded forward: a flat list of kernel calls with the row count as an argument.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "kernels.hpp"
#include "memory.hpp"
#include "pool.hpp"
#include "sampling.hpp"
#include "weights.hpp"

// What a matrix product does to its input on the way in, so that no op of its own is needed.
enum class Prologue { none, norm, gated };

struct Source {
  int buffer;
  Prologue prologue;
  const float* norm_weight;
  float eps;
  Activation activation = Activation::silu;
};

// Which tokens of a draft vocabulary may be picked: those of the `top` clusters that score best.
struct Clusters {
  int scores = -1;  // buffer of a row's score for each cluster; -1 where nothing is clustered
  std::shared_ptr<const std::vector<int32_t>> members = nullptr;  // a token's cluster
  int count = 0;  // of clusters; a buffer's row is wider
  int top = 0;
  int tiles = 0;  // of each cluster where all follow one another in as many whole ones, else 0
};

struct Op {
  enum class Kind { embed, linear, logits, norm_add, rope_append, rope, attention, pick } kind;
  Source in;
  int out = -1, residual = -1;
  std::shared_ptr<Weight> weight = nullptr;
  const float* bias = nullptr;  // of a product
  float scale = 1;              // of an embedding or what norm_add sums
  float softcap = 0;            // of logits
  HeadNorms norms{};            // of rotations
  std::shared_ptr<KV> kv = nullptr;
  int layer = 0;
  int width = 0;        // columns of norm_add
  int attention = -1;   // of a product: which op is the next attention
  int blocks_left = 0;  // of a tile and a group of weights, from here to there
  // A product that is activated behind it, or reads what was; see joining.cpp.
  bool activates = false, activated = false;
  Activation activation = Activation::silu;  // that it `activates`
  // Of drafts: query heads where they are not the target's, ids of what is picked, the draft step
  // that it belongs to, and whether no barrier follows.
  int heads = 0;
  int window = -1;      // of an attention where it is not the layer's
  bool advance = true;  // of a rotation: by the draft step, else every step alike
  std::shared_ptr<const std::vector<int32_t>> ids = nullptr;
  Clusters clusters{};  // of a pick
  int step = 0;
  bool joined = false;
};

// What a draft goes by besides the rows of the target's view, whose positions are those of the last
// token before the anchors.
struct Drafting {
  const int32_t* kept_rows;
  int k;
  const float* temperatures;
  const uint64_t* seeds;
  const uint32_t* choices;
  int32_t* drafted;  // token j of row r at j * rows + r
};

// Up to this many rows every member normalises and rounds the rows for itself: cheaper than a
// barrier.
constexpr int ALONE_ROWS = 2;
constexpr int TILE_ROWS = 4;  // rows of one sequence that share a page's conversion to float32
constexpr auto SHORTEST_ALONE = std::chrono::microseconds(20000);

class Program {
  using Clock = std::chrono::steady_clock;

 public:
  Program(const Kernels* kernels, const SamplingKernels* sampling, std::shared_ptr<Team> team,
          int max_rows, int max_logits, float* logits, int32_t* argmax, int vocab);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Recording. A buffer is float32 of shape (max_rows, width); `slot` numbers it.
  int buffer(int width);
  int own_buffer(int width);                     // a copy for each member where rows are few
  int borrow(const Program& target, int buffer);  // row r is row kept_rows[r] of the target's
  void embed(std::shared_ptr<Weight> weight, float scale, int out);
  void linear(Source in, std::shared_ptr<Weight> weight, const float* bias, int residual, int out);
  void norm_add(Source in, int residual, float scale, int width, int out);
  void rope_append(int qkv, std::shared_ptr<KV> kv, int layer, HeadNorms norms, int out);
  void attention(int q, std::shared_ptr<KV> kv, int layer, int out);
  void logits(Source in, std::shared_ptr<Weight> weight, float softcap);
  // Of `heads` query heads, 0 for the layer's own.
  void rope(int q, std::shared_ptr<KV> kv, int layer, HeadNorms norms, int heads,
            bool advance, int out);
  void attend_before(int q, std::shared_ptr<KV> kv, int layer, int heads, int window, int out);
  void pick(Source in, std::shared_ptr<Weight> weight, std::vector<int32_t> ids, Clusters clusters,
            int out);

  // Replay over the rows; `share` rows use one read of the weights. Results go to the arrays given
  // at construction: logits of the wanted rows in order, and the index of each largest.
  void run(const RowsView& rows, const int32_t* logit_rows, int num_logits, int share);
  // Draft; every row is live.
  void run_draft(const RowsView& rows, const Drafting& drafting, int share);

  size_t scratch_bytes() const;

 private:
  struct Range {
    int begin, end;
  };
  struct Best {
    float value;
    int32_t index;
  };
  struct RowTile {  // rows of one sequence, none of them padding
    int row0, num, splits;
    int lowest, highest;  // positions
  };
  struct Turns {  // first, first + stride, ... below end
    int first, end, stride;
  };
  struct alignas(64) Member {
    std::vector<int32_t> pages;  // that its attentions read, in order
    Fetch fetch;
    std::vector<int32_t> tokens;  // of a draft's rows, in this step
    // Of a pick among clusters: whether row r's best are with it, at r * count + cluster; those that
    // any row's are; the tiles of those that this member computes; and scratch.
    std::vector<uint8_t> is_best;
    std::vector<int32_t> wanted;
    std::vector<Range> ranges;
    std::vector<float> scores;
  };
  struct Buffer {
    enum class Kind { shared, own, borrowed } kind;
    int width;
    Memory memory;
    float* data;
  };
  Op& add(Op::Kind kind, Source in, int out);
  void run_team();
  Range mine(int member, int units) const;
  float* at(int slot, int row, int member) const;
  int width(int slot) const { return buffers_[size_t(slot)].width; }
  int add_buffer(Buffer::Kind kind, int width, int rows);
  KVView view(const Op&) const;
  void work(int member);
  void lead_to_attention();
  Turns tiles_of(const Op&, int member) const;
  void plan_fetch(int member);
  Fetch& fetch_for(const Op&, int member);
  void run_embed(const Op&, int member);
  // Of a product in one part, `only` says which tiles the member computes.
  void run_matmul(const Op&, int member, const std::vector<Range>* only = nullptr);
  void run_norm_add(const Op&, int member);
  void run_rope_append(const Op&, int member);
  void run_rope(const Op&, int member);
  bool side_by_side(const Op&, int members) const;
  int first_split(const KVView&, int position) const;
  int span(const KVView&) const;
  void run_attention(const Op&, int member);
  bool whole_tiles() const;
  void attend_whole(const Op&, int member);
  void attend_tile(const Op&, int tile, int head, int next_row, float* running);
  int next_row(int tile, int stride) const;
  void fold_for_itself(const Op&, int member);
  void run_argmax(int member);
  void prepare_row(const Source&, const Weight&, int row, int source_row, int rows, int group0,
                   int group1, int member, float* dense, Act* acts) const;
  void plan_rows(int num_logits);
  void join();
  bool barrier_after(const Op&) const;
  bool alone(const Op&, int rows) const;
  bool folds_for_itself() const;
  Range share_of(const Op&, const Matrix&, int first, int member) const;
  Act* activations() const;
  void activate(const Op&, int member);
  void run_pick(const Op&, int member);
  void find_best_clusters(const Op&, int member);
  void leave_best_clusters(const Op&, int member, int row, int n0, int n1) const;
  void take_tiles(const Op&, int member);
  Best best_of(const Op&, int member, int row, int n0, int n1) const;

  const Kernels* kernels_;
  const SamplingKernels* sampling_;
  std::shared_ptr<Team> team_;
  const int max_rows_, max_logits_, vocab_;
  float* const logits_;
  int32_t* const argmax_;
  std::vector<Op> ops_;
  std::vector<Buffer> buffers_;
  int max_k_ = 0, picks_ = 0;  // picks recorded so far
  bool any_dense_ = false;

  // Of the step that runs.
  RowsView rows_{};
  const int32_t* logit_rows_ = nullptr;
  int num_logits_ = 0, share_ = MAX_SHARE;
  std::vector<RowTile> tiles_;
  std::vector<Member> members_;
  int max_splits_ = 0;
  Memory acts_, dense_, partials_;
  size_t activated_ = 0;  // where activated rows begin in acts_
  std::vector<Best> best_;
  Drafting drafting_{};
  int steps_ = 1;
  bool drafts_ = false;  // the program is a draft's
  bool joined_ = false;
  bool few_ = false;  // so few rows of a draft that members rather repeat work than wait

  // Of the machine: until when other processes make the team slower than one thread.
  Clock::time_point alone_until_{};
  std::chrono::microseconds alone_for_ = SHORTEST_ALONE;
  int stalls_ = 0;  // in a row
};
