"""What a profile's numbers depend on: the model, the drafter, the processor and the kernels."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

from slipstream import __version__
from slipstream.config import EngineConfig
from slipstream.drafters import ngram
from slipstream.kernels.ops import Backend
from slipstream.models.loading.assistant_config import CONFIG_FILE
from slipstream.models.loading.names import cache_dir
from slipstream.policy.profile import ProfileKey


def profile_folder() -> Path:
    """Return where profiles are kept; it need not exist."""
    return cache_dir() / "profiles"


def assistant_key(folder: Path) -> str:
    """Return what tells an assistant's checkpoint apart."""
    digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):  # large ones come in parts
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"assistant {digest.hexdigest()[:32]}"


def profile_key(
    backend: Backend, fingerprint: str, config: EngineConfig, *, paid: str = ""
) -> ProfileKey:
    """Return the key of a model's profile with its drafters.

    Args:
        fingerprint: tells model files apart.
        paid: tells paid drafters apart, "" for none.
    """
    drafters = [paid] if paid else []
    if config.uses_ngram:
        drafters.insert(0, f"ngram {ngram.LONGEST} to {ngram.SHORTEST}")
    threads = getattr(backend, "threads", 1)
    device, driver = (
        f"{processor()}, {threads} threads",
        f"{platform.system()} {platform.machine()}",
    )
    if hasattr(backend, "driver"):  # a GPU; the host's own work is a part of every round
        device, driver = f"{getattr(backend, 'device', '')}, {device}", f"{driver} {backend.driver}"
    return ProfileKey(
        target=fingerprint,
        drafter=" + ".join(drafters),
        device=device,
        driver=driver,
        kernels=" ".join(
            [
                f"{__version__} {backend.name} {getattr(backend, 'isa', '')} {_build(backend)}",
                f"{config.verify_kernel} {config.verify_pad} {config.tile_m}",
            ]
        ),
    )


@cache
def processor() -> str:
    """Return the processor's name, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _build(backend: Backend) -> str:
    """Return what tells builds of a back end's kernels apart, "" where there are none."""
    return str(getattr(backend, "build", None) or _native_build())


@cache
def _native_build() -> str:
    """Return a hash of the compiled cpu kernels, "" where there are none."""
    try:
        from slipstream.kernels.cpu import _native
    except ImportError:
        return ""
    return hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()[:16]
