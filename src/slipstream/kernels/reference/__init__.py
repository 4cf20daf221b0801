"""The reference back end: every op in plain torch, the definition of correct.

Fast back ends are tested against it; it serves when no compiled one is there. Torch's own kernels
are not row invariant (a matrix product may take another path at 3 rows than at 1), so nothing here
ever sees two rows: each op takes its rows one by one, each row a fresh copy, so that shape and
alignment are the same whatever rides along. A step runs on one thread, so the reduction order does
not depend on the machine's setting. Attention reads K and V back from the pages, rounded to
the cache's dtype, this step's own rows included. It runs every family that `Arch` can describe.

Not here: speed. A weight is held as float32 and read once per row.
"""

from slipstream.kernels.reference.arithmetic import round_to_int8
from slipstream.kernels.reference.backend import ReferenceBackend
from slipstream.kernels.reference.draft import ReferenceDraftOps
from slipstream.kernels.reference.ops import ReferenceOps

__all__ = ["ReferenceBackend", "ReferenceDraftOps", "ReferenceOps", "round_to_int8"]
