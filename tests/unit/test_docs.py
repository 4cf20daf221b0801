"""Generated documentation is what the code says today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = ROOT / "scripts" / "generate_docs.py"
    spec = importlib.util.spec_from_file_location("generate_docs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_benchmark_tables_are_what_the_results_say() -> None:
    path = ROOT / "scripts" / "benchmark_tables.py"
    spec = importlib.util.spec_from_file_location("benchmark_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    assert module.MARK.search(page)
    assert page == module.filled(page), "run python scripts/benchmark_tables.py"


@pytest.mark.parametrize(
    ("name", "function"),
    [("cli.md", "command_line"), ("environment-variables.md", "environment_variables")],
)
def test_generated_page_is_up_to_date(generator: ModuleType, name: str, function: str) -> None:
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == getattr(generator, function)(), "run make docs"
