"""Which GPU there is, asked of the driver: machines without one need not import torch for that."""

from __future__ import annotations

import ctypes
from functools import cache

_DRIVER = "libcuda.so.1"


@cache
def has_device() -> bool:
    """Tell whether the driver is there and shows this process a GPU."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return not failed and count.value > 0


def driver_version() -> str:
    """Return the kernel driver's release, e.g. "580.159.04", else the driver API's number."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
        return next(word for word in words if word[:1].isdigit() and "." in word)
    except (OSError, StopIteration):
        number = ctypes.c_int(0)
        ctypes.CDLL(_DRIVER).cuDriverGetVersion(ctypes.byref(number))
        return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
