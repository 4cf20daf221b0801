// Python's view of the CPU back end: packs weights, owns pages, records and replays programs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "program.hpp"
#include "sampling_module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T, size_t N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Ints = Array<const int32_t, 1>;

const Kernels* kernels_for(const std::string& isa) {
#if defined(SLIPSTREAM_AVX512)
  if (isa == "avx512" && avx512_supported()) return avx512_kernels();
#endif
  if (isa == "portable") return portable_kernels();
  throw std::invalid_argument("isa " + isa + " is not available");
}

Matrix::Kind kind_of(const std::string& dtype) {
  if (dtype == "f32") return Matrix::Kind::f32;
  if (dtype == "f16") return Matrix::Kind::f16;
  if (dtype == "bf16") return Matrix::Kind::bf16;
  throw std::invalid_argument("dtype must be f32, f16 or bf16, got " + dtype);
}

Numbers numbers_of(const std::string& kind) {
  if (kind == "f32") return Numbers::f32;
  if (kind == "f16") return Numbers::f16;
  if (kind == "bf16") return Numbers::bf16;
  if (kind == "two_level") return Numbers::two_level;
  throw std::invalid_argument("numbers must be f32, f16, bf16 or two_level, got " + kind);
}

// (values, small or None), arrays of shape (N, anything); None for nothing.
GroupNumbers group_numbers(nb::object pair) {
  if (pair.is_none()) return {};
  const auto both = nb::cast<nb::tuple>(pair);
  GroupNumbers numbers;
  numbers.values = nb::cast<nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>>(both[0]).data();
  if (!both[1].is_none()) numbers.small = nb::cast<Array<const uint8_t, 2>>(both[1]).data();
  return numbers;
}

// Null for None.
const float* vector(nb::object array) {
  return array.is_none() ? nullptr : nb::cast<Array<const float, 1>>(array).data();
}

Source source(int buffer, const std::string& prologue, nb::object weight, float eps) {
  if (prologue == "none") return {buffer, Prologue::none, nullptr, 0};
  if (prologue == "silu") return {buffer, Prologue::gated, nullptr, 0, Activation::silu};
  if (prologue == "gelu_tanh") return {buffer, Prologue::gated, nullptr, 0, Activation::gelu_tanh};
  if (prologue == "norm") return {buffer, Prologue::norm, vector(weight), eps};
  throw std::invalid_argument("prologue " + prologue + " is not known");
}

HeadNorms head_norms(nb::object q, nb::object k, float eps) { return {vector(q), vector(k), eps}; }

std::vector<int32_t> vector_of(Ints values) {
  return std::vector<int32_t>(values.data(), values.data() + values.shape(0));
}

void run(Program& program, Ints token_ids, Ints positions, Ints sequences,
         Array<const int32_t, 2> page_table, Ints logit_rows, int share) {
  // Shapes and ranges are checked by the Python wrapper.
  const RowsView rows{int(token_ids.shape(0)), token_ids.data(),  positions.data(),
                      sequences.data(),        page_table.data(), int(page_table.shape(1))};
  nb::gil_scoped_release release;
  program.run(rows, logit_rows.data(), int(logit_rows.shape(0)), share);
}

void run_draft(Program& program, Ints token_ids, Ints last_positions, Ints sequences,
               Array<const int32_t, 2> page_table, Ints kept_rows, int k,
               Array<const float, 1> temperatures, Array<const uint64_t, 1> seeds,
               Array<const uint32_t, 1> choices, Array<int32_t, 2> drafted, int share) {
  const RowsView rows{int(token_ids.shape(0)), token_ids.data(),  last_positions.data(),
                      sequences.data(),        page_table.data(), int(page_table.shape(1))};
  const Drafting drafting{kept_rows.data(), k,          temperatures.data(), seeds.data(),
                          choices.data(),   drafted.data()};
  nb::gil_scoped_release release;
  program.run_draft(rows, drafting, share);
}

nb::object read_page(const KV& kv, int layer, int page, bool values) {
  const KVView view = kv.view(layer);
  const uint16_t* from = (values ? view.v : view.k) + size_t(page) * view.page_stride;
  const size_t plane = kv.plane(layer);
  auto* copy = new uint16_t[plane];
  std::memcpy(copy, from, plane * sizeof(uint16_t));
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<uint16_t*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, uint16_t>(copy, {plane}, owner));
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("GROUP") = GROUP;
  m.attr("SUPER") = SUPER;
  m.attr("MAX_SHARE") = MAX_SHARE;
  m.attr("MAX_HEAD_DIM") = MAX_HEAD_DIM;
  m.def("avx512_supported", &avx512_supported);
  bind_sampling(m);

  nb::class_<Team>(m, "Team").def(nb::init<int>(), "size"_a).def_prop_ro("size", &Team::size);

  nb::class_<Arena>(m, "Arena").def(nb::init<>()).def_prop_ro("used", &Arena::used);

  nb::class_<Weight>(m, "Weight")
      .def("__init__",
           [](Weight* self, std::shared_ptr<Arena> arena) {
             new (self) Weight{std::move(arena), {}};
           })
      .def_ro("n", &Weight::n)
      .def_ro("k", &Weight::k)
      .def("add_quantized",
           [](Weight& self, int bits, int zero, int group, Array<const uint8_t, 2> codes,
              const std::string& numbers, nb::object scale, nb::object bias) {
             Matrix m{Matrix::Kind::quantized, int(codes.shape(0)), int(codes.shape(1))};
             m.bits = bits;
             m.zero = zero;
             m.group = group;
             m.has_bias = !bias.is_none();
             m.numbers = numbers_of(numbers);
             self.add_quantized(m, codes.data(), group_numbers(scale), group_numbers(bias));
           }, "bits"_a, "zero"_a, "group"_a, "codes"_a, "numbers"_a, "scale"_a, "bias"_a.none())
      .def("add_dense", [](Weight& self, const std::string& dtype, Array<const uint16_t, 2> v) {
        self.add_dense(kind_of(dtype), int(v.shape(0)), int(v.shape(1)), v.data());
      })
      .def("add_dense", [](Weight& self, const std::string& dtype, Array<const float, 2> v) {
        self.add_dense(kind_of(dtype), int(v.shape(0)), int(v.shape(1)), v.data());
      });

  nb::class_<KVLayer>(m, "KVLayer")
      .def("__init__",
           [](KVLayer* self, int owner, int heads, int kv_heads, int head_dim,
              Array<const float, 2> cos, Array<const float, 2> sin, bool interleaved, float scale,
              int window, float softcap, bool v_norm, bool k_is_v) {
             new (self) KVLayer{{heads, kv_heads, head_dim, cos.data(), sin.data(), interleaved,
                                 scale, window, softcap, v_norm, k_is_v}, owner};
           }, nb::kw_only(), "owner"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "cos"_a, "sin"_a,
           "interleaved"_a, "scale"_a, "window"_a, "softcap"_a, "v_norm"_a, "k_is_v"_a);

  nb::class_<KV>(m, "KV")
      .def("__init__",
           [](KV* self, std::vector<KVLayer> layers, int num_pages) {
             new (self) KV(std::move(layers), num_pages);
           }, "layers"_a, "num_pages"_a)
      .def("zero", &KV::zero, "page"_a)
      .def("read", &read_page, "layer"_a, "page"_a, "values"_a);

  nb::class_<Program>(m, "Program")
      .def("__init__",
           [](Program* self, const std::string& isa, std::shared_ptr<Team> team, int max_rows,
              Array<float, 2> logits, Array<int32_t, 1> argmax) {
             new (self) Program(kernels_for(isa), sampling_for(isa), std::move(team), max_rows,
                                int(logits.shape(0)), logits.data(), argmax.data(),
                                int(logits.shape(1)));
           })
      .def("buffer", &Program::buffer, "width"_a)
      .def("embed", &Program::embed, "weight"_a, "scale"_a, "out"_a)
      .def("linear",
           [](Program& self, int in, const std::string& prologue, nb::object norm, float eps,
              std::shared_ptr<Weight> weight, nb::object bias, int residual, int out) {
             self.linear(source(in, prologue, norm, eps), std::move(weight), vector(bias), residual,
                         out);
           }, "in"_a, "prologue"_a, "norm"_a.none(), "eps"_a, "weight"_a, "bias"_a.none(),
           "residual"_a, "out"_a)
      .def("norm_add",
           [](Program& self, int in, nb::object norm, float eps, int residual, float scale,
              int width, int out) {
             self.norm_add(source(in, "norm", norm, eps), residual, scale, width, out);
           }, "in"_a, "norm"_a, "eps"_a, "residual"_a, "scale"_a, "width"_a, "out"_a)
      .def("logits",
           [](Program& self, int in, const std::string& prologue, nb::object norm, float eps,
              std::shared_ptr<Weight> weight, float softcap) {
             self.logits(source(in, prologue, norm, eps), std::move(weight), softcap);
           }, "in"_a, "prologue"_a, "norm"_a.none(), "eps"_a, "weight"_a, "softcap"_a)
      .def("rope_append",
           [](Program& self, int qkv, std::shared_ptr<KV> kv, int layer, nb::object q_norm,
              nb::object k_norm, float eps, int out) {
             self.rope_append(qkv, std::move(kv), layer, head_norms(q_norm, k_norm, eps), out);
           }, "qkv"_a, "kv"_a, "layer"_a, "q_norm"_a.none(), "k_norm"_a.none(), "eps"_a, "out"_a)
      .def("attention", &Program::attention, "q"_a, "kv"_a, "layer"_a, "out"_a)
      .def("own_buffer", &Program::own_buffer, "width"_a)
      .def("borrow", &Program::borrow, "target"_a, "buffer"_a)
      .def("rope",
           [](Program& self, int q, std::shared_ptr<KV> kv, int layer, nb::object q_norm, float eps,
              int heads, bool advance, int out) {
             self.rope(q, std::move(kv), layer, head_norms(q_norm, nb::none(), eps), heads, advance,
                       out);
           }, "q"_a, "kv"_a, "layer"_a, "q_norm"_a.none(), "eps"_a, "heads"_a, "advance"_a, "out"_a)
      .def("attend_before", &Program::attend_before, "q"_a, "kv"_a, "layer"_a, "heads"_a,
           "window"_a, "out"_a)
      .def("pick",
           [](Program& self, int in, const std::string& prologue, nb::object norm, float eps,
              std::shared_ptr<Weight> weight, Ints ids, int scores, Ints clusters, int count,
              int top, int out) {
             self.pick(source(in, prologue, norm, eps), std::move(weight), vector_of(ids),
                       {scores, std::make_shared<const std::vector<int32_t>>(vector_of(clusters)),
                        count, top},
                       out);
           }, "in"_a, "prologue"_a, "norm"_a.none(), "eps"_a, "weight"_a, "ids"_a, "scores"_a,
           "clusters"_a, "count"_a, "top"_a, "out"_a)
      .def("run_draft", &run_draft)
      .def("run", &run)
      .def_prop_ro("scratch_bytes", &Program::scratch_bytes);
}
