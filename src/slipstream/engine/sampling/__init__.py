"""From one row of raw logits to one token, as a pure function of row, history, seed and position.

`validate_sampling` checks what a caller asks, `RowHistory` holds what precedes a row, `Processors`
turn penalties, bias and bans into replaced logits, and `Sampler` picks the token.
"""

from slipstream.engine.sampling.history import RowHistory
from slipstream.engine.sampling.kernel import (
    PickKernel,
    kernel_beside,
    native_kernel,
    reference_kernel,
)
from slipstream.engine.sampling.processors import Processors
from slipstream.engine.sampling.sampler import PickSettings, Sampler, no_token
from slipstream.engine.sampling.validation import validate_sampling
from slipstream.types import TokenLogprobs

__all__ = [
    "PickKernel",
    "PickSettings",
    "Processors",
    "RowHistory",
    "Sampler",
    "TokenLogprobs",
    "kernel_beside",
    "native_kernel",
    "no_token",
    "reference_kernel",
    "validate_sampling",
]
