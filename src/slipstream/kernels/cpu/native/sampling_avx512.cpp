// Sampling on the AVX-512 path; whether it may run is asked of the processor elsewhere.
#include "sampling.inl"

const SamplingKernels* avx512_sampling() { return &table; }
