"""What the GPU tests take from those of every back end, with `cuda` in the others' place."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cuda"])
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param
