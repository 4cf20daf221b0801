"""A profile's key names the GPU, its driver and the build of its kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from slipstream.config import EngineConfig
from slipstream.engine.identity import processor, profile_key


def gpu(**changes: Any) -> Any:
    """Return as much of a GPU's back end as a key looks at."""
    return SimpleNamespace(
        **{"name": "cuda", "device": "GPU X", "driver": "580.1", "build": "abc", **changes}
    )


def test_a_gpus_key_names_what_its_times_depend_on() -> None:
    key = profile_key(gpu(), "model", EngineConfig())
    assert key.device.startswith("GPU X, ")
    assert processor() in key.device
    assert key.driver.endswith("580.1")
    assert "cuda" in key.kernels
    assert "abc" in key.kernels


def test_another_device_driver_or_build_is_another_profile() -> None:
    config = EngineConfig()
    keys = [
        profile_key(backend, "model", config).file_name
        for backend in (gpu(), gpu(device="GPU Y"), gpu(driver="581"), gpu(build="abd"))
    ]
    assert len(set(keys)) == 4


def test_without_a_gpu_the_key_is_that_of_the_processor() -> None:
    backend: Any = SimpleNamespace(name="reference")
    assert profile_key(backend, "model", EngineConfig()).device == f"{processor()}, 1 threads"
