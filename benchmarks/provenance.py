"""Where benchmarks find a model and the text to measure on; `provenance` is the package's."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))  # this checkout goes before an installed one

from slipstream.bench.provenance import provenance  # noqa: E402

__all__ = ["DEFAULT_MODEL", "find_model", "provenance", "sample_text"]

DEFAULT_MODEL = "smollm2-135m"


def find_model(name: str) -> Path:
    """Return the file of a path or of a pulled model's name."""
    from slipstream.models.loading import resolve_model

    return Path(name) if Path(name).is_file() else Path(resolve_model(name))


def sample_text() -> str:
    """Return the text that prompts and likelihoods are measured on."""
    return (HERE / "data" / "ordinary_text.txt").read_text(encoding="utf-8")
