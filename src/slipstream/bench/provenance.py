"""What a benchmark's numbers depend on: machine, versions, commit, model file."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.models.loading.hub import title_of

# Instruction sets that decide which kernels run.
_TELLING_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
    "asimddp",
)
_PACKAGES = ("numpy", "torch", "tokenizers", "transformers", "llama-cpp-python", "openvino-genai")
_PACKAGE_FOLDER = Path(__file__).resolve().parent.parent


def provenance(model: Path | str) -> dict[str, Any]:
    """Return machine, versions, commit and the model's hash as JSON values.

    Args:
        model: its file or folder, or the name of one that has none.
    """
    # Installed into somebody else's checkout it would be that one's commit.
    tracked = _git("ls-files", "--", Path(__file__).name, folder=Path(__file__).parent)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_cpu(),
        "memory_bytes": _memory_bytes(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "slipstream": __version__,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "commit": (_git("rev-parse", "--short=12", "HEAD") if tracked else "") or None,
        "modified": bool(tracked and _git("status", "--porcelain", "--", ".")),
        **_model(model),
    }


def _model(model: Path | str) -> dict[str, Any]:
    if isinstance(model, str):
        return {"model": model, "model_bytes": None, "model_sha256": None}
    if model.is_dir():
        return _folder(model)
    digest = _digest(model)
    return {"model": model.name, "model_bytes": model.stat().st_size, "model_sha256": digest}


def _folder(folder: Path) -> dict[str, Any]:
    """Return the same of a folder; the hash is that of its files' names and hashes, by name."""
    paths = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors"))
    listed = "".join(f"{path.name} {_digest(path)}\n" for path in paths)
    return {
        "model": title_of(folder),
        "model_bytes": sum(p.stat().st_size for p in paths if p.suffix == ".safetensors"),
        "model_sha256": hashlib.sha256(listed.encode()).hexdigest(),
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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


def _memory_bytes() -> int | None:
    """Return the machine's memory, None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _git(*arguments: str, folder: Path = _PACKAGE_FOLDER) -> str:
    """Return what git says of the folder that the package lies in, "" where it is no checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
