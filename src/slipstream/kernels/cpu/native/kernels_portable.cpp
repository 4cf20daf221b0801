// The path that compiles and runs anywhere.
#include "attention.inl"

const Kernels* portable_kernels() { return &table; }
