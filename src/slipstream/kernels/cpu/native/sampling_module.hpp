// Adds sampling to the Python module.
#pragma once

#include <nanobind/nanobind.h>

void bind_sampling(nanobind::module_& m);
