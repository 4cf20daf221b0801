"""The families of decoders that are read, each a module of its own: see `family.Family`."""

from slipstream.models.loading.families.family import Family
from slipstream.models.loading.families.gemma2 import GEMMA2
from slipstream.models.loading.families.gemma3 import GEMMA3
from slipstream.models.loading.families.gemma4 import GEMMA4
from slipstream.models.loading.families.llama import LLAMA
from slipstream.models.loading.families.qwen2 import QWEN2
from slipstream.models.loading.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "GEMMA4", "Family"]

FAMILIES = (LLAMA, QWEN2, QWEN3, GEMMA2, GEMMA3, GEMMA4)
