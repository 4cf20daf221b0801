"""Imports point one way, and the engine starts without torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "slipstream"

# Each part may import itself and the tiers above; parts of one tier do not know each other.
TIERS = (
    {"types", "errors", "config"},
    {"policy", "kernels"},
    {"models"},
    {"drafters"},
    {"engine"},
    {"server", "bench", "train"},
    {"cli"},
)
# Pure descriptions that back ends repack from: data without behaviour, so no edge back.
EXCEPTIONS = {("kernels", "slipstream.models.arch"), ("kernels", "slipstream.models.weights")}


def allowed(part: str) -> set[str]:
    """Return the parts that `part` may import."""
    below: set[str] = set()
    for tier in TIERS:
        if part in tier:
            return below | ({part} if tier is not TIERS[0] else tier)
        below |= tier
    raise AssertionError(f"{part} has no place among the tiers: give it one")


def edges() -> Iterator[tuple[Path, str, str]]:
    """Yield (file, part, imported module) for every import of our own, function-level ones too."""
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE)
        if inside == Path("__init__.py"):  # the public names, resolved lazily
            continue
        package = ["slipstream", *inside.parent.parts]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                modules = [module]
                if module == "slipstream" or not node.module:
                    modules = [f"{module}.{alias.name}" for alias in node.names]
            else:
                continue
            for module in modules:
                if module.startswith("slipstream."):
                    yield path, inside.parts[0].removesuffix(".py"), module


def test_every_import_points_down() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {module}"
        for path, part, module in edges()
        if module.split(".")[1] not in allowed(part)
        and (part, module) not in EXCEPTIONS
        # The package's own lazy names, e.g. its version.
        and not module.startswith("slipstream.__")
    ]
    assert not wrong


def test_a_back_edge_would_be_seen() -> None:
    assert "engine" not in allowed("policy")
    assert "kernels" not in allowed("policy")
    assert {"policy", "kernels", "models", "drafters"} <= allowed("engine")
    assert ("kernels", "slipstream.models.decoder") not in EXCEPTIONS
    assert len({path for path, _, _ in edges()}) > 10


def loaded_by(module: str) -> set[str]:
    """Return what a fresh interpreter has loaded after importing a module of ours."""
    program = f"import sys, slipstream.{module}; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["policy.fixed", "drafters.ngram", "engine.engine", "engine.load", "models.loading"],
)
def test_core_imports_no_torch(module: str) -> None:
    assert not loaded_by(module) & {"torch", "transformers", "fastapi", "typer", "triton"}


def test_policy_imports_no_numpy() -> None:
    assert "numpy" not in loaded_by("policy.fixed")
