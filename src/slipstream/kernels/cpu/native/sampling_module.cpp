// Python's view of the sampling kernels.
#include "sampling_module.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <vector>

#include "kernels.hpp"
#include "sampling.hpp"

namespace nb = nanobind;
using namespace nb::literals;

const SamplingKernels* sampling_for(const std::string& isa) {
#if defined(SLIPSTREAM_AVX512)
  if (isa == "avx512" && avx512_supported()) return avx512_sampling();
#endif
  if (isa == "portable") return portable_sampling();
  throw std::invalid_argument("isa " + isa + " is not available");
}

namespace {

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Each thread that samples keeps its own, as large as the largest vocabulary it met.
float* scratch_for(int n) {
  thread_local std::vector<float> scratch;
  if (scratch.size() < scratch_floats(n)) scratch.resize(scratch_floats(n));
  return scratch.data();
}

template <class T>
nb::object to_numpy(const T* from, size_t n) {
  T* copy = new T[n ? n : 1];
  std::copy(from, from + n, copy);
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(copy, {n}, owner));
}

int size_of(const Vector<const float>& logits) {
  if (logits.shape(0) < 1 || logits.shape(0) > (1u << 30))
    throw std::invalid_argument("a row of logits must have 1 to 2**30 of them");
  return int(logits.shape(0));
}

int32_t pick(const std::string& isa, Vector<const float> logits, Vector<const int32_t> ids,
             Vector<const float> values, nb::object allowed, float temperature, int top_k,
             double top_p, double min_p, uint64_t seed, uint32_t choice, uint32_t position) {
  const int n = size_of(logits);
  if (ids.shape(0) != values.shape(0))
    throw std::invalid_argument("ids and values must have one length");
  for (size_t i = 0; i < ids.shape(0); ++i)
    if (ids.data()[i] < 0 || ids.data()[i] >= n)
      throw std::invalid_argument("an override is outside the row");
  PickRow row{logits.data(), n, ids.data(), values.data(), int(ids.shape(0)), nullptr,
              temperature, top_k, top_p, min_p, {seed, position, choice, 0}};
  if (!allowed.is_none()) {
    const auto mask = nb::cast<Vector<const bool>>(allowed);
    if (mask.shape(0) != logits.shape(0))
      throw std::invalid_argument("a mask must be as long as its row");
    row.allowed = mask.data();
  }
  const SamplingKernels* kernels = sampling_for(isa);
  nb::gil_scoped_release release;
  return kernels->pick(row, scratch_for(n));
}

nb::object summarize(const std::string& isa, Vector<const float> logits, int num_top) {
  const int n = size_of(logits);
  const SamplingKernels* kernels = sampling_for(isa);
  RowSummary summary{};
  std::vector<int32_t> top(size_t(num_top < n ? (num_top > 0 ? num_top : 0) : n));
  int count;
  {
    nb::gil_scoped_release release;
    count = kernels->summarize(logits.data(), n, int(top.size()), scratch_for(n), summary,
                               top.data());
  }
  if (count < 0) return nb::none();
  return nb::make_tuple(summary.largest, summary.total, to_numpy(top.data(), size_t(count)));
}

nb::object noise(const std::string& isa, uint64_t seed, uint32_t choice, uint32_t position,
                 uint32_t domain, int n) {
  std::vector<uint32_t> bits(size_t(n > 0 ? n : 0));
  std::vector<float> gumbel(bits.size());
  sampling_for(isa)->noise({seed, position, choice, domain}, int(bits.size()), bits.data(),
                           gumbel.data());
  return nb::make_tuple(to_numpy(bits.data(), bits.size()),
                        to_numpy(gumbel.data(), gumbel.size()));
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("pick", &pick, "isa"_a, "logits"_a, "ids"_a, "values"_a, "allowed"_a.none(),
        "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a, "choice"_a, "position"_a);
  m.def("summarize", &summarize, "isa"_a, "logits"_a, "num_top"_a);
  m.def("noise", &noise, "isa"_a, "seed"_a, "choice"_a, "position"_a, "domain"_a, "n"_a);
}
