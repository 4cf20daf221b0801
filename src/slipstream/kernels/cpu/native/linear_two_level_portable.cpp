// Products of matrices with scales in two levels on the portable path.
#include "tiles.inl"

Matmul* portable_two_level(const Matrix& m) {
  if (is_kind<Q4Super>(m)) return matmul_tiles<Q4Super>;
  if (is_kind<Q5Super>(m)) return matmul_tiles<Q5Super>;
  if (is_kind<Q6Super>(m)) return matmul_tiles<Q6Super>;
  return nullptr;
}
