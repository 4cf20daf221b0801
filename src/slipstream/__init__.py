"""Slipstream serves open-weight language models and speeds them up with speculative decoding.

Three promises: the text is the target model's own whatever the drafter does, decoding is never
slower than without speculation, and every decision can be read.

    import slipstream

    engine = slipstream.load("smollm2-135m")
    for chunk in engine.stream("Why is the sky blue?", slipstream.SamplingParams(max_tokens=64)):
        print(chunk.text, end="", flush=True)

Names are imported on first use, so that `import slipstream` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.engine.engine import Engine
    from slipstream.engine.load import load
    from slipstream.engine.threaded import ThreadedEngine
    from slipstream.errors import (
        CapacityError,
        ConfigError,
        LoadError,
        MismatchError,
        RequestError,
        SlipstreamError,
    )
    from slipstream.types import Chunk, DetailedReply, Grammar, Reply, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "Chunk",
    "ConfigError",
    "DetailedReply",
    "Engine",
    "EngineConfig",
    "Grammar",
    "LoadError",
    "MismatchError",
    "Reply",
    "RequestError",
    "SamplingParams",
    "SlipstreamError",
    "ThreadedEngine",
    "__version__",
    "load",
]

_HOMES = {
    "CapacityError": "slipstream.errors",
    "Chunk": "slipstream.types",
    "ConfigError": "slipstream.errors",
    "DetailedReply": "slipstream.types",
    "Engine": "slipstream.engine.engine",
    "EngineConfig": "slipstream.config",
    "Grammar": "slipstream.types",
    "LoadError": "slipstream.errors",
    "MismatchError": "slipstream.errors",
    "Reply": "slipstream.types",
    "RequestError": "slipstream.errors",
    "SamplingParams": "slipstream.types",
    "SlipstreamError": "slipstream.errors",
    "ThreadedEngine": "slipstream.engine.threaded",
    "load": "slipstream.engine.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
