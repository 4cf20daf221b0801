"""`--speculative-config`: vLLM's JSON object, for the keys that mean the same here."""

from __future__ import annotations

import json
from typing import Any

from slipstream.config import EngineConfig, nearest
from slipstream.errors import ConfigError

KEYS = ("method", "model", "num_speculative_tokens")
METHODS = ("auto", "none", "ngram", "assistant", "ngram+assistant", "draft_model")
OF_A_MODEL = ("draft_model", "assistant")  # those whose weights `model` names


def speculative_settings(text: str) -> dict[str, Any]:
    """Return the engine settings that a speculative config stands for.

    `method` names a drafter, `model` the file or folder that its weights are in, and
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
    method = value.get("method")
    allowed = OF_A_MODEL if "model" in value else METHODS
    if method is not None and method not in allowed:
        beside = " beside speculative_config.model" if "model" in value else ""
        raise ConfigError(
            f"speculative_config.method must be one of {', '.join(allowed)}{beside}, "
            f"got {method[:80]!r}"
        )
    if "model" in value:  # a drafter of its own is named by its file
        settings["drafter"] = value["model"]
    elif method == "draft_model":
        raise ConfigError(
            "speculative_config.method draft_model needs speculative_config.model",
            hint="name a model of the target's vocabulary, as MODEL is named",
        )
    elif method is not None:
        settings["drafter"] = method
    tokens = value.get("num_speculative_tokens")
    if tokens is not None:
        if isinstance(tokens, bool) or not isinstance(tokens, int):
            raise ConfigError(
                f"speculative_config.num_speculative_tokens must be an integer, got {tokens!r}"
            )
        settings["max_k"] = tokens
    _check(settings)
    return settings


def _check(settings: dict[str, Any]) -> None:
    """Have the engine's own checks speak of the key that is to blame."""
    for name, key in (("drafter", "model"), ("max_k", "num_speculative_tokens")):
        if name in settings:
            try:
                EngineConfig(**{name: settings[name]})
            except ConfigError as error:
                message = error.message.replace(name, f"speculative_config.{key}", 1)
                raise ConfigError(message, hint=error.hint) from None
