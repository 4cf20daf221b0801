// Products of quantized matrices on the portable path: the kinds with templates of their own, and the choice.
#include "tiles.inl"

void portable_matmul(const Matrix& m, const Act* acts, int rows, int share, int tile0, int tile1,
                   const Output& to, Fetch& fetch) {
  Matmul* fn = nullptr;
  if (m.numbers == Numbers::two_level)
    fn = portable_two_level(m);
  else if (is_kind<Q4Bias>(m))
    fn = matmul_tiles<Q4Bias>;
  else if (is_kind<Q4Zero>(m))
    fn = matmul_tiles<Q4Zero>;
  else if (is_kind<Q8Zero>(m))
    fn = matmul_tiles<Q8Zero>;
  if (!fn) fn = portable_other(m);
  fn(m, acts, rows, share, tile0, tile1, to, fetch);
}
