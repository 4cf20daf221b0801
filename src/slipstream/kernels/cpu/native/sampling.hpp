// Choosing a token from a row of logits: plain functions over raw pointers, one table per ISA path.
// engine/sampling/reference.py is the definition, and all paths agree with it to the last bit.
#pragma once

#include <cstddef>
#include <cstdint>

// What noise depends on besides the token.
struct NoiseKey {
  uint64_t seed;
  uint32_t position, choice, domain;
};

struct PickRow {
  const float* logits;  // raw, never written
  int n;
  // Logits to replace, in order: the last of an id counts.
  const int32_t* ids;
  const float* values;
  int num_overrides;
  const bool* allowed;  // null, or false where a token is forbidden
  float temperature;    // 0 takes the largest
  int top_k;            // 0 keeps all
  double top_p, min_p;  // 1 and 0 keep all
  NoiseKey noise;
};

// Raw log-softmax of a row, up to what the caller does in double.
struct RowSummary {
  float largest;  // NaN aside
  double total;   // sum of exp(logit - largest)
};

struct SamplingKernels {
  // The token, -1 where no logit is finite or one is +inf. `scratch` holds scratch_floats(n).
  int32_t (*pick)(const PickRow&, float* scratch);
  // `top` receives the ids of the num_top largest logits in order of id; returns their number.
  int (*summarize)(const float* logits, int n, int num_top, float* scratch, RowSummary& out,
                   int32_t* top);
  // Index of the first largest of logits[i] / temperature + noise of token ids[i], i in [n0, n1), n0 a
  // multiple of 16; -1 if there is none, else its value goes to `best`. `logits` and `ids` can be
  // read to the next multiple of 16.
  int32_t (*race_ids)(const float* logits, const int32_t* ids, int n0, int n1, float temperature,
                      const NoiseKey&, float& best);
  // The 32 bits of noise of tokens [0, n), for tests; and what they become.
  void (*noise)(const NoiseKey&, int n, uint32_t* bits, float* gumbel);
};

// Five arrays: logits, weights, and values, weights and ids of a list, each to whole blocks and one
// vector on.
inline size_t padded(int n) { return (size_t(n) + 31) / 32 * 32; }
inline size_t scratch_floats(int n) { return 5 * (padded(n) + 16); }

const SamplingKernels* portable_sampling();
const SamplingKernels* avx512_sampling();  // defined where SLIPSTREAM_AVX512 is
