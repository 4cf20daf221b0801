"""Every block of docs/library.md and every example runs on the default model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import LoadError
from slipstream.models.loading import resolve_model

pytestmark = pytest.mark.real_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "library.md"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where the default model is not there, and leave settings of the environment out."""
    for name in list(os.environ):
        if name.startswith("SLIPSTREAM_") and name != "SLIPSTREAM_CACHE_DIR":
            monkeypatch.delenv(name)
    try:
        resolve_model("smollm2-135m")
    except LoadError as error:
        pytest.skip(error.message)


def test_every_block_of_the_library_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(page))
    assert len(blocks) == page.count("```") // 2, "a block that is not Python is not run"
    names: dict[str, Any] = {}
    for block in blocks:
        line = page.count("\n", 0, block.start(1))
        # Blank lines in front, so that an error names the page's own line.
        exec(compile("\n" * line + block.group(1), str(PAGE), "exec"), names)
    assert capsys.readouterr().out


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout
    assert not run.stderr
