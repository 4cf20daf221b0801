"""`--speculative-config`: vLLM's JSON object, for the keys that mean the same here."""

from __future__ import annotations

import json
from typing import Any

from slipstream.config import EngineConfig, nearest
from slipstream.errors import ConfigError

KEYS = ("method", "model", "num_speculative_tokens")


def speculative_settings(text: str) -> dict[str, Any]:
    """Return the engine settings that a speculative config stands for.

    `method` names a drafter, `model` the file that a drafter of its own is in, and
    `num_speculative_tokens` is the most that a round drafts: how many it does is measured.

    Args:
        text: a JSON object, or nothing.

    Raises:
        ConfigError: it is no object, or a key is unknown (the nearest is named) or of a wrong type.
    """
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"speculative_config must be JSON, got {text[:80]}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"speculative_config must be a JSON object, got {text[:80]}")
    for key in value:
        if key not in KEYS:
            raise ConfigError(f"unknown key of speculative_config: {key}", hint=nearest(key, KEYS))
    settings: dict[str, Any] = {}
    for key in ("method", "model"):
        if key in value and not isinstance(value[key], str):
            raise ConfigError(f"speculative_config.{key} must be text, got {value[key]!r}")
    if "model" in value:  # a drafter of its own is named by its file
        settings["drafter"] = value["model"]
    elif value.get("method") == "draft_model":
        raise ConfigError(
            "speculative_config.method draft_model needs speculative_config.model",
            hint="name a model of the target's vocabulary, as MODEL is named",
        )
    elif "method" in value:
        settings["drafter"] = value["method"]
    tokens = value.get("num_speculative_tokens")
    if tokens is not None:
        if isinstance(tokens, bool) or not isinstance(tokens, int):
            raise ConfigError(
                f"speculative_config.num_speculative_tokens must be an integer, got {tokens!r}"
            )
        settings["max_k"] = tokens
    _check(settings, "model" if "model" in value else "method")
    return settings


def _check(settings: dict[str, Any], drafter_key: str) -> None:
    """Have the engine's own checks speak of the key that is to blame."""
    for name, key in (("drafter", drafter_key), ("max_k", "num_speculative_tokens")):
        if name in settings:
            try:
                EngineConfig(**{name: settings[name]})
            except ConfigError as error:
                message = error.message.replace(name, f"speculative_config.{key}", 1)
                raise ConfigError(message, hint=error.hint) from None
