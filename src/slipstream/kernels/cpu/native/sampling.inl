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
};
constexpr Cut KEEP_ALL = {-INFINITY, -1};

// Some tokens in order of id.
struct List {
  float* values;
  float* weights;
  int32_t* ids;
  int n;
};

struct Row {
  float* values;
  float* weights;
  int n, end;  // `end` rounds n up to blocks; values between are -inf
  float largest, temperature;
  float unit;  // weight of the largest, a power of two

  float scaled(int32_t id) const { return (values[id] - largest) / temperature; }
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

// The median of nine values, evenly spaced.
inline float middle(const float* values, int n) {
  float some[9];
  for (int i = 0; i < 9; ++i) {
    const float value = values[int64_t(2 * i + 1) * n / 18];
    int j = i;
    for (; j > 0 && some[j - 1] > value; --j) some[j] = some[j - 1];
    some[j] = value;
  }
  return some[4];
}

// Where the sum of weights (of ones if UNIT), largest value first, reaches `target`: quickselect.
// Equal values have equal weights and come in order of id. The list is used up.
template <bool UNIT>
Cut cut_at(List list, double target) {
  while (list.n > 0) {
    const float pivot = middle(list.values, list.n);
    const S::F p = S::set1(pivot);
    S::D above = S::none(), at = S::none();
    int num_above = 0, num_at = 0;
    for (int i = 0; i < list.n; i += 16) {
      const S::F values = S::load(list.values + i);
      const S::M live = first_lanes(list.n - i);
      const S::M over = S::greater(values, p) & live, same = S::equal(values, p) & live;
      if (UNIT) {
        num_above += __builtin_popcount(over);
        num_at += __builtin_popcount(same);
      } else {
        const S::F weights = S::load(list.weights + i);
        above = S::add(above, weights, over);
        at = S::add(at, weights, same);
      }
    }
    double sum = UNIT ? num_above : S::sum(above);
    const double with_pivot = sum + (UNIT ? num_at : S::sum(at));
    const bool up = sum >= target;
    if (!up && with_pivot >= target) {
      for (int i = 0;; ++i) {
        if (list.values[i] != pivot) continue;
        sum += UNIT ? 1 : double(list.weights[i]);
        if (sum >= target) return {pivot, list.ids[i]};
      }
    }
    if (!up) target -= with_pivot;
    int n = 0;
    for (int i = 0; i < list.n; i += 16) {
      const S::F values = S::load(list.values + i);
      const S::M live = (up ? S::greater(values, p) : S::greater(p, values)) &
                        first_lanes(list.n - i);
      if (!UNIT) S::pack(list.weights + n, list.weights + i, live);
      S::pack(list.ids + n, list.ids + i, live);
      S::pack(list.values + n, list.values + i, live);
      n += __builtin_popcount(live);
    }
    list.n = n;
  }
  return KEEP_ALL;
}

// The cut of top-k, then of top-p over what that keeps.
Cut find_cut(const Row& row, int top_k, double top_p, double total, List& list) {
  Cut cut = KEEP_ALL;
  const bool by_count = top_k > 0 && top_k < row.n;
  if (by_count) {
    gather(row, cut, 0, list);
    if (top_k < list.n) cut = cut_at<true>(list, top_k);
  }
  if (top_p >= 1) return cut;
  float light = 1;
  if (by_count) {
    gather(row, cut, light, list);
    total = sum_weights(list);
  } else {
    // All that weigh less than (1 - p) total / n sum to less than (1 - p) total: none is kept.
    const double lightest = 0.999 * (1 - top_p) * total / row.n;
    if (lightest > 4096) light = float(lightest);  // or rounding might matter
    gather(row, cut, light, list);
  }
  const double target = std::ceil(top_p * total);
  return cut_at<false>(list, target > 1 ? target : 1);
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
  if (asked.allowed)
    for (int i = 0; i < row.n; ++i) row.values[i] = asked.allowed[i] ? row.values[i] : -INFINITY;
  const int32_t first = find_largest(row);
  if (!(row.largest - row.largest == 0)) return -1;
  if (asked.temperature == 0) return first;
  row.temperature = asked.temperature;
  const double total = weigh(row);
  List list = list_of(row);
  const Cut cut = find_cut(row, asked.top_k, asked.top_p, total, list);
  const float light = asked.min_p > 0 ? float(asked.min_p * double(row.unit)) : 0;
  if (cut.value == KEEP_ALL.value && light == 0)
    return race_all(row, asked.noise, cut, light, first);
  gather(row, cut, light, list);
  // A block of noise costs about as much as two tokens one by one.
  return list.n * 16 <= row.n ? race_list(row, asked.noise, list, first)
                              : race_all(row, asked.noise, cut, light, first);
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
  gather(row, KEEP_ALL, 0, list);
  if (num_top < list.n) gather(row, cut_at<true>(list, num_top), 0, list);
  std::memcpy(top, list.ids, size_t(list.n) * sizeof(int32_t));
  return list.n;
}

void noise(const NoiseKey& key, int n, uint32_t* bits, float* out) {
  for (int i = 0; i < n; ++i) {
    bits[i] = noise_bits(key, uint32_t(i));
    out[i] = gumbel(bits[i]);
  }
}

const SamplingKernels table = {pick, summarize, noise};

}  // namespace
