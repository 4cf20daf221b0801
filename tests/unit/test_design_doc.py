"""Names in the design document are names in the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
PARTS = ("types", "policy", "kernels", "models", "drafters", "engine", "cli")
JOURNEY = PAGE.split("## How a token travels")[1].split("\n## ")[0]
NAMES = sorted(set(re.findall(rf"`((?:{'|'.join(PARTS)})\.[\w.]+)`", JOURNEY)))


def test_the_journey_names_its_stations() -> None:
    assert len(NAMES) > 25


@pytest.mark.parametrize("name", NAMES)
def test_every_station_exists(name: str) -> None:
    module, *path = name.split(".")
    found = importlib.import_module(f"slipstream.{module}")
    for index, part in enumerate(path):
        if not hasattr(found, part):
            module = ".".join([name.split(".")[0], *path[: index + 1]])
            try:
                found = importlib.import_module(f"slipstream.{module}")
            except ModuleNotFoundError as error:
                if error.name in ("torch", "slipstream.kernels.cpu._native"):
                    pytest.skip(f"{error.name} is not there")
                raise
        else:
            found = getattr(found, part)
