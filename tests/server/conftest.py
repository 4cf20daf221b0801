"""One server with a toy model for all tests that look at it from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the server's packages are not installed")
pytest.importorskip("fastapi", reason="the server's packages are not installed")

import slipstream
from slipstream.engine.engine import Engine
from tests.server.process import ServerProcess, serving
from tests.server.toy import write_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's file."""
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def server(toy: Path) -> Iterator[ServerProcess]:
    """A server of it, which calls the model "toy"."""
    with serving(toy, "--served-model-name", "toy") as process:
        yield process
        assert not any("Traceback" in line for line in process.lines), "".join(process.lines)


@pytest.fixture(scope="session")
def alone(toy: Path) -> Engine:
    """The same model without a server, one request at a time, no drafts."""
    return slipstream.load(toy, drafter="none", max_num_seqs=1)
