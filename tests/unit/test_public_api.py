"""What `import slipstream` offers, and what it leaves alone until it is asked for."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import slipstream
from slipstream import errors

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", slipstream.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(slipstream, name) is not None


def test_all_is_sorted_and_is_what_dir_shows() -> None:
    assert list(slipstream.__all__) == sorted(slipstream.__all__) == dir(slipstream)


def test_every_lazy_name_is_public() -> None:
    assert set(slipstream._HOMES) | {"__version__"} == set(slipstream.__all__)


def test_every_error_is_public() -> None:
    members = inspect.getmembers(errors, inspect.isclass)
    raised = {name for name, item in members if item.__module__ == errors.__name__}
    assert raised <= set(slipstream.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        slipstream.lode  # noqa: B018


def test_version_is_the_project_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert slipstream.__version__ == project["version"]


@pytest.mark.parametrize("module", ["slipstream", "slipstream.cli"])
def test_import_leaves_heavy_modules_alone(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(run.stdout.split())
    assert not loaded & {"torch", "numpy", "tokenizers", "jinja2", "transformers"}
