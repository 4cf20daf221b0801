// One row of logits to one token: argmax over the kept ids of logit / T + Gumbel noise.
//
// A weight is exp((logit - largest) / T) rounded to a multiple of 2**-bits, so small that sums of a
// whole vocabulary are exact in double. Exact sums have no order, so the nucleus is found by
// selection instead of sorting, and is the one that sorting finds.
//
// Noise is bounded by its own bits: -log(1 - w) >= w, so a token reaches the best score so far only
// if w <= exp(logit / T - best). The logarithms are computed for the few that pass.
#pragma once

#include <cmath>

#include "noise.inl"

namespace {

constexpr S::M ALL_LANES = 0xffff;

inline S::M first_lanes(int n) { return n >= 16 ? ALL_LANES : n <= 0 ? 0 : (1u << n) - 1u; }

// Keeps values above `value`, and those equal to it up to id `id`.
struct Cut {
  float value;
  int32_t id;
  int count;  // of what it keeps; a token whose weight rounds to 0 may be left out
};
constexpr Cut KEEP_ALL = {-INFINITY, -1, 0};

// Some tokens in order of id.
struct List {
  float* values;
  float* weights;
  int32_t* ids;  // null in a whole row
  int n;

  int32_t id(int i) const { return ids ? ids[i] : i; }
};

struct Row {
  float* values;
  float* weights;
  int n, end;  // `end` rounds n up to blocks; values between are -inf
  float largest, temperature;
  float unit;  // weight of the largest, a power of two

  float scaled(int32_t id) const { return (values[id] - largest) / temperature; }
  List all() const { return {values, weights, nullptr, end}; }
};

// exp(x) for x <= 0, without fused products; 0 to a weight's precision below -60.
inline S::F exp_unfused(const S::F& x) {
  const auto step = [](const S::F& p, const S::F& r, float c) {
    return S::add(S::mul(p, r), S::set1(c));
  };
  const S::F clamped = S::max(x, S::set1(-60.0f));
  const S::F n = S::rint(S::mul(clamped, S::set1(1.44269504f)));
  S::F r = S::add(clamped, S::mul(n, S::set1(-0.693359375f)));
  r = S::add(r, S::mul(n, S::set1(2.12194440e-4f)));
  S::F p = S::set1(1.0f / 720);
  p = step(p, r, 1.0f / 120);
  p = step(p, r, 1.0f / 24);
  p = step(p, r, 1.0f / 6);
  p = step(p, r, 0.5f);
  p = step(p, r, 1.0f);
  p = step(p, r, 1.0f);
  return S::scale2(p, n);
}

// The weight of the largest logit: sums over n tokens stay below 2**53.
inline float weight_unit(int n) {
  int bits = 53;
  for (int64_t reach = 1; reach < n; reach *= 2) --bits;
  return float(uint64_t(1) << (bits > 50 ? 50 : bits));
}

Row lay_out(const float* logits, int n, float* scratch) {
  const int end = int(padded(n));
  std::memcpy(scratch, logits, size_t(n) * sizeof(float));
  for (int i = n; i < end + 16; ++i) scratch[i] = -INFINITY;
  return {scratch, scratch + end + 16, n, end, 0, 1, weight_unit(n)};
}

// Put what a grammar forbids at -inf: in bits and bytes, which become vectors where bools do not.
void forbid(const Row& row, const bool* allowed) {
  const uint32_t infinite = 0xff800000u;
  const auto* keeps = reinterpret_cast<const uint8_t*>(allowed);
  float* __restrict values = row.values;
  const int n = row.n;
  for (int i = 0; i < n; ++i) {
    const uint32_t keep = 0u - uint32_t(keeps[i]);
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bits = (bits & keep) | (infinite & ~keep);
    std::memcpy(values + i, &bits, sizeof bits);
  }
}

List list_of(const Row& row) {
  float* at = row.weights + row.end + 16;
  return {at, at + row.end + 16, reinterpret_cast<int32_t*>(at + 2 * (row.end + 16)), 0};
}

// Set row.largest and return its first id; NaN is nobody's largest.
int32_t find_largest(Row& row) {
  S::F best = S::set1(-INFINITY);
  for (int i = 0; i < row.end; i += 16) best = S::max(S::load(row.values + i), best);
  row.largest = S::largest(best);
  const S::F largest = S::set1(row.largest);
  for (int i = 0; i < row.end; i += 16)
    if (const S::M hits = S::equal(S::load(row.values + i), largest)) return i + __builtin_ctz(hits);
  return 0;
}

// Fill row.weights and return their sum.
double weigh(Row& row) {
  const S::F largest = S::set1(row.largest), unit = S::set1(row.unit);
  const S::F temperature = S::set1(row.temperature);
  const bool divide = row.temperature != 1;
  S::D total = S::none();
  for (int i = 0; i < row.end; i += 16) {
    S::F x = S::sub(S::load(row.values + i), largest);
    if (divide) x = S::div(x, temperature);
    const S::F weight = S::whole(S::mul(exp_unfused(x), unit));
    S::store(row.weights + i, weight);
    total = S::add(total, weight, ALL_LANES);
  }
  return S::sum(total);
}

inline bool keeps(const Cut& cut, float value, int32_t id) {
  return value > cut.value || (value == cut.value && id <= cut.id);
}

// Collect what a cut keeps and what weighs at least `light`.
void gather(const Row& row, const Cut& cut, float light, List& list) {
  const S::F value = S::set1(cut.value), floor = S::set1(light);
  int n = 0;
  for (int i = 0; i < row.end; i += 16) {
    const S::F values = S::load(row.values + i);
    S::M live = S::equal(values, value) & first_lanes(cut.id + 1 - i);
    live |= S::greater(values, value);
    live &= ~S::greater(floor, S::load(row.weights + i));
    if (!live) continue;
    S::pack(list.values + n, row.values + i, live);
    S::pack(list.weights + n, row.weights + i, live);
    S::pack_count(list.ids + n, i, live);
    n += __builtin_popcount(live);
  }
  list.n = n;
}

double sum_weights(const List& list) {
  S::D total = S::none();
  for (int i = 0; i < list.n; i += 16)
    total = S::add(total, S::load(list.weights + i), first_lanes(list.n - i));
  return S::sum(total);
}

// A value of the list near where the sum of weights, largest value first, reaches a share of the
// total: that place among evenly spaced samples.
template <bool UNIT>
float guess(const List& list, double share) {
  constexpr int NUM = 16;
  float values[NUM], weights[NUM];
  int num = 0;
  double total = 0;
  for (int i = 0; i < NUM; ++i) {
    const int64_t at = int64_t(2 * i + 1) * list.n / (2 * NUM);
    const float value = list.values[at], weight = UNIT ? 1 : list.weights[at];
    if (!(value > -INFINITY)) continue;
    int j = num++;
    for (; j > 0 && values[j - 1] < value; --j) {
      values[j] = values[j - 1];
      weights[j] = weights[j - 1];
    }
    values[j] = value;
    weights[j] = weight;
    total += weight;
  }
  double sum = 0;
  for (int i = 0; i < num; ++i) {
    sum += weights[i];
    if (sum >= share * total) return values[i];
  }
  if (num > 0) return values[num - 1];
  float largest = -INFINITY;  // a row with hardly a token in it
  for (int i = 0; i < list.n; ++i) largest = list.values[i] > largest ? list.values[i] : largest;
  return largest;
}

// The smallest whole number of equal weights that reach `rest`; their products are exact.
inline int count_to(double rest, double weight) {
  double count = std::ceil(rest / weight);
  if ((count - 1) * weight >= rest) --count;
  if (count * weight < rest) ++count;
  return int(count);
}

// The id of the count-th of the list's values that equal `value`.
int32_t nth_id(const List& list, float value, int count) {
  int i = 0;
  for (; i < list.n; i += 16) {
    const int num = __builtin_popcount(S::equal(S::load(list.values + i), S::set1(value)) &
                                       first_lanes(list.n - i));
    if (num >= count) break;
    count -= num;
  }
  while (list.values[i] != value || --count) ++i;
  return list.id(i);
}

// Where the sum of weights (of ones if UNIT), largest value first, reaches `target`, or KEEP_ALL:
// quickselect. Equal values have equal weights and come in order of id. `list` may be `from`, and
// its contents are lost. The total only guides the guesses.
template <bool UNIT>
Cut cut_at(List from, List list, double target, double total) {
  const S::F low = S::set1(-INFINITY);
  int num_kept = 0;
  while (from.n > 0) {
    const float pivot = guess<UNIT>(from, target / total);
    const S::F p = S::set1(pivot);
    S::D above = S::none(), at = S::none();
    int num_above = 0, num_at = 0;
    for (int i = 0; i < from.n; i += 16) {
      const S::F values = S::load(from.values + i);
      const S::M live = first_lanes(from.n - i);
      const S::M over = S::greater(values, p) & live, same = S::equal(values, p) & live;
      num_above += __builtin_popcount(over);
      num_at += __builtin_popcount(same);
      if (UNIT) continue;
      const S::F weights = S::load(from.weights + i);
      above = S::add(above, weights, over);
      at = S::add(at, weights, same);
    }
    const double sum = UNIT ? num_above : S::sum(above), sum_at = UNIT ? num_at : S::sum(at);
    const bool up = sum >= target;
    if (!up && sum + sum_at >= target) {
      const int count = count_to(target - sum, sum_at / num_at);
      return {pivot, nth_id(from, pivot, count), num_kept + num_above + count};
    }
    if (up) {
      total = sum;
    } else {
      num_kept += num_above + num_at;
      target -= sum + sum_at;
      total -= sum + sum_at;
    }
    int n = 0;
    for (int i = 0; i < from.n; i += 16) {
      const S::F values = S::load(from.values + i);
      S::M live = up ? S::greater(values, p) : S::greater(p, values) & S::greater(values, low);
      live &= first_lanes(from.n - i);
      if (!live) continue;
      if (!UNIT) S::pack(list.weights + n, from.weights + i, live);
      if (from.ids) S::pack(list.ids + n, from.ids + i, live);
      else S::pack_count(list.ids + n, i, live);
      S::pack(list.values + n, from.values + i, live);
      n += __builtin_popcount(live);
    }
    list.n = n;
    from = list;
  }
  return KEEP_ALL;
}

// The cut of top-k, then of top-p over what that keeps.
Cut find_cut(const Row& row, int top_k, double top_p, double total, List& list) {
  Cut cut = KEEP_ALL;
  if (top_k > 0 && top_k < row.n) cut = cut_at<true>(row.all(), list, top_k, row.n);
  if (top_p >= 1) return cut;
  List from = row.all();
  if (cut.count > 0) {
    gather(row, cut, 0, list);
    total = sum_weights(list);
    from = list;
  } else if (total < row.n / 8 * double(row.unit)) {
    // Peaked: all that weigh less than (1 - p) total / n sum to less than (1 - p) total, so none of
    // them is kept. A threshold of a few units is not worth what rounding could do to it.
    const double light = 0.999 * (1 - top_p) * total / row.n;
    gather(row, cut, light > 4096 ? float(light) : 1, list);
    from = list;
  }
  const double target = std::ceil(top_p * total);
  return cut_at<false>(from, list, target > 1 ? target : 1, total);
}

// Finds the largest score, lowest id first, among tokens that enter in any order.
struct Race {
  const Row& row;
  const NoiseKey& noise;
  int32_t best;
  float score;
  float reach;  // bits + 1/2 > (weight + 1) reach: the token cannot win

  Race(const Row& row, const NoiseKey& noise, int32_t first)
      : row(row), noise(noise), best(first), score(score_of(first)) {
    update_reach();
  }
  float score_of(int32_t id) const { return row.scaled(id) + gumbel(noise_bits(noise, id)); }
  // A thousandth covers the rounding of weights, logarithms and of this itself.
  void update_reach() { reach = float(std::exp(-double(score)) * 0x1p32 / row.unit * 1.001); }
  void enter(int32_t id) {
    const float own = score_of(id);
    if (own > score || (own == score && id < best)) {
      best = id;
      score = own;
      update_reach();
    }
  }
};

// All tokens compete, and those that could win are checked.
int32_t race_all(const Row& row, const NoiseKey& noise, const Cut& cut, float light, int32_t first) {
  Race race(row, noise, first);
  const S::F one = S::set1(1.0f), half = S::set1(0.5f);
  for (int i = 0; i < row.end; i += NOISE_BLOCK) {
    const S::F reach = S::set1(race.reach);
    const S::F low = S::mul(S::add(S::load(row.weights + i), one), reach);
    const S::F high = S::mul(S::add(S::load(row.weights + i + 16), one), reach);
    if (!S::greater(S::max(low, high), half)) continue;
    S::F low_bits, high_bits;
    noise_block(noise, uint32_t(i), low_bits, high_bits);
    S::M open = (~S::greater(S::add(low_bits, half), low) & ALL_LANES) |
                (~S::greater(S::add(high_bits, half), high) & ALL_LANES) << 16;
    for (; open; open &= open - 1) {
      const int32_t id = i + __builtin_ctz(open);
      if (keeps(cut, row.values[id], id) && row.weights[id] >= light) race.enter(id);
    }
  }
  return race.best;
}

int32_t race_list(const Row& row, const NoiseKey& noise, const List& list, int32_t first) {
  Race race(row, noise, first);
  for (int i = 0; i < list.n; ++i) {
    const float most = (list.weights[i] + 1.0f) * race.reach;
    if (most <= 0.5f || float(noise_bits(noise, list.ids[i])) + 0.5f > most) continue;
    race.enter(list.ids[i]);
  }
  return race.best;
}

int32_t pick(const PickRow& asked, float* scratch) {
  Row row = lay_out(asked.logits, asked.n, scratch);
  for (int i = 0; i < asked.num_overrides; ++i) row.values[asked.ids[i]] = asked.values[i];
  if (asked.allowed) forbid(row, asked.allowed);
  const int32_t first = find_largest(row);
  if (!(row.largest - row.largest == 0)) return -1;
  if (asked.temperature == 0) return first;
  row.temperature = asked.temperature;
  const double total = weigh(row);
  List list = list_of(row);
  const Cut cut = find_cut(row, asked.top_k, asked.top_p, total, list);
  const float light = asked.min_p > 0 ? float(asked.min_p * double(row.unit)) : 0;
  // A block of noise costs about as much as two tokens one by one.
  const int few = row.n / 16;
  const bool keeps_most = light == 0 && (cut.value == KEEP_ALL.value || cut.count > few);
  if (!keeps_most) gather(row, cut, light, list);
  return keeps_most || list.n > few ? race_all(row, asked.noise, cut, light, first)
                                    : race_list(row, asked.noise, list, first);
}

int summarize(const float* logits, int n, int num_top, float* scratch, RowSummary& out,
              int32_t* top) {
  Row row = lay_out(logits, n, scratch);
  find_largest(row);
  out.largest = row.largest;
  if (!(row.largest - row.largest == 0)) return -1;
  out.total = weigh(row) / double(row.unit);
  if (num_top == 0) return 0;
  List list = list_of(row);
  gather(row, cut_at<true>(row.all(), list, num_top, row.n), 0, list);
  std::memcpy(top, list.ids, size_t(list.n) * sizeof(int32_t));
  return list.n;
}

// As in Race: only a token whose noise could lift it above the best so far is computed.
int32_t race_ids(const float* logits, const int32_t* ids, int n0, int n1, float temperature,
                 const NoiseKey& key, float& best) {
  const S::F divisor = S::set1(temperature), half = S::set1(0.5f), zero = S::zero();
  const S::F reach = S::set1(0x1p32f * 1.001f);
  int32_t winner = -1;
  best = -INFINITY;
  for (int i = n0; i < n1; i += 16) {
    const S::F x = S::div(S::load(logits + i), divisor);
    const S::F most = S::mul(exp_unfused(S::min(S::sub(x, S::set1(best)), zero)), reach);
    S::M open = ~S::greater(half, most) & first_lanes(n1 - i);
    if (!open) continue;
    open &= ~S::greater(S::add(noise_of(key, ids + i), half), most);
    for (; open; open &= open - 1) {
      const int at = i + __builtin_ctz(open);
      const float own = logits[at] / temperature + gumbel(noise_bits(key, uint32_t(ids[at])));
      if (own > best) best = own, winner = at;
    }
  }
  return winner;
}

void noise(const NoiseKey& key, int n, uint32_t* bits, float* out) {
  for (int i = 0; i < n; ++i) {
    bits[i] = noise_bits(key, uint32_t(i));
    out[i] = gumbel(bits[i]);
  }
}

const SamplingKernels table = {pick, summarize, race_ids, noise};

}  // namespace
