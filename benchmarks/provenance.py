"""What a benchmark's numbers depend on: machine, versions, commit, file."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULT_MODEL = "smollm2-135m"
# Instruction sets that decide which kernels either side runs.
_TELLING_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
    "asimddp",
)


def provenance(model: Path) -> dict[str, Any]:
    """Return machine, versions, commit and the model's hash as JSON values."""
    return {
        **_cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--", "../src")),
        "model": model.name,
        "model_bytes": model.stat().st_size,
        "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
    }


def find_model(name: str) -> Path:
    """Return the file of a path or of a pulled model's name."""
    if Path(name).is_file():
        return Path(name)
    sys.path.insert(0, str(HERE.parent / "src"))  # this checkout goes before an installed one
    from slipstream.models.loading import resolve_model

    return Path(resolve_model(name))


def sample_text() -> str:
    """Return the text that prompts and likelihoods are measured on."""
    return (HERE / "data" / "ordinary_text.txt").read_text(encoding="utf-8")


def _cpu() -> dict[str, Any]:
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "cpu": fields.get("model name", platform.machine()),
        "flags": [flag for flag in _TELLING_FLAGS if flag in flags],
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
