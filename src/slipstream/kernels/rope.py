"""RoPE tables, computed once in float64 and shared by every back end.

Rotary embedding turns each pair of a head's columns by an angle that grows with the position
(Su et al. 2021, RoFormer, section 3.2.2). Back ends that computed their own angles would disagree
in the last bits at long context, so all of them read these tables. Which two columns make a pair is
the back end's affair (`Arch.rope_interleaved`); no frequency scaling is done here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def rope_tables(head_dim: int, theta: float, max_len: int) -> tuple[F32, F32]:
    """Return the cosine and sine of every position's angles.

    Args:
        head_dim: width of a head, even.
        theta: base frequency; pair i turns by `position * theta ** (-2 i / head_dim)`.
        max_len: positions 0 to max_len - 1 are tabulated.

    Returns:
        (cos, sin), each C-contiguous float32 of shape (max_len, head_dim / 2).
    """
    pairs = np.arange(head_dim // 2, dtype=np.float64)
    frequencies = np.power(np.float64(theta), -2.0 * pairs / head_dim)
    angles = np.arange(max_len, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
