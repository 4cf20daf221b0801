// The AVX-512 path (F, BW, DQ, VL, VNNI); whether it may run is asked of the processor elsewhere.
#include "attention.inl"

const Kernels* avx512_kernels() {
  static const Kernels table = kernel_table(avx512_matmul);
  return &table;
}
