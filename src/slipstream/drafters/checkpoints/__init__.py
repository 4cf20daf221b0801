"""Assistants that are shipped: a folder here for each, found by the target that it names."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.models.loading.assistant_config import CONFIG_FILE

FOLDER = Path(__file__).parent


def shipped_assistant(fingerprint: str, folder: Path = FOLDER) -> Path | None:
    """Return the folder of the assistant that was made for a target, None where there is none.

    Args:
        fingerprint: the target's `ModelFile.fingerprint`.
    """
    for path in sorted(folder.glob(f"*/{CONFIG_FILE}")):
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["target"]["hash"] == fingerprint:
            return path.parent
    return None
