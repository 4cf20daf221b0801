"""RoPE tables, computed once in float64 and shared by every back end.

Rotary embedding turns each pair of a head's columns by an angle that grows with the position
(Su et al. 2021, RoFormer, section 3.2.2). Back ends that computed their own angles would disagree
in the last bits at long context, so all of them read these tables. How fast each pair turns is the
family's affair (`AttentionArch.frequencies`), and which two columns make a pair the back end's
(`AttentionArch.rope_interleaved`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def rope_tables(
    frequencies: Sequence[float], max_len: int, magnitude: float = 1.0
) -> tuple[F32, F32]:
    """Return the cosine and sine of every position's angles.

    Args:
        frequencies: of shape (D / 2,); pair i turns by `position * frequencies[i]`.
        max_len: positions 0 to max_len - 1 are tabulated.
        magnitude: multiplies both.

    Returns:
        (cos, sin), each C-contiguous float32 of shape (max_len, D / 2).
    """
    angles = np.arange(max_len, dtype=np.float64)[:, None] * np.array(frequencies, np.float64)
    cos, sin = magnitude * np.cos(angles), magnitude * np.sin(angles)
    return cos.astype(np.float32), sin.astype(np.float32)
