// The path that compiles and runs anywhere.
#include "attention.inl"

const Kernels* portable_kernels() {
  static const Kernels table = kernel_table(portable_matmul);
  return &table;
}
