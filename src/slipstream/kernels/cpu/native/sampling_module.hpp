// Adds sampling to the Python module.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "sampling.hpp"

// The kernels of an instruction path; throws where this build or processor lacks it.
const SamplingKernels* sampling_for(const std::string& isa);

void bind_sampling(nanobind::module_& m);
