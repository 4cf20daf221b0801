// Sampling on the path that compiles and runs anywhere.
#include "sampling.inl"

const SamplingKernels* portable_sampling() { return &table; }
