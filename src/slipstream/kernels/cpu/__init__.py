"""The CPU back end: C++ kernels, recorded once and replayed without Python.

`CpuBackend` packs canonical weights into tiles, owns the KV pages and compiles a forward into a
`Program`, a flat list of kernel calls that a small thread team runs. Two instruction paths compute
it: AVX-512 with VNNI, and portable C++. Importing this module without the compiled extension raises
ImportError; the caller falls back to the reference.
"""

from __future__ import annotations

# First and by its full name, so that its absence is reported as just that.
import slipstream.kernels.cpu._native  # noqa: F401
from slipstream.kernels.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
