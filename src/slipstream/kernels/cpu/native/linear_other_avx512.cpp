// Products of all other quantized matrices on the AVX-512 path.
#include "tiles.inl"

Matmul* avx512_other(const Matrix& m) {
  const bool halves = m.group < GROUP;
  switch (m.bits) {
    case 4: return halves ? matmul_tiles<Other<4, 2>> : matmul_tiles<Other<4, 1>>;
    case 5: return halves ? matmul_tiles<Other<5, 2>> : matmul_tiles<Other<5, 1>>;
    case 6: return halves ? matmul_tiles<Other<6, 2>> : matmul_tiles<Other<6, 1>>;
    default: return halves ? matmul_tiles<Other<8, 2>> : matmul_tiles<Other<8, 1>>;
  }
}
