"""Configuration: each field has one default, one flag and one `SLIPSTREAM_*` variable.

Flags, variables and their help derive from the dataclass fields, so a default stands in one place.
Precedence: explicit argument, then environment, then default.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from slipstream.errors import ConfigError
from slipstream.types import MAX_K, KSetting

PREFIX = "SLIPSTREAM_"
# Variables that are not engine settings: the folder of pulled models and profiles.
OTHER_VARIABLES = ("SLIPSTREAM_CACHE_DIR",)


def _setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float = 0,
    high: float = 1 << 24,  # far above any use, far below what would overflow a size
    metavar: str = "",
    paths: bool = False,
    secret: bool = False,
) -> Any:
    metadata = {
        "help": help,
        "choices": choices,
        "low": low,
        "high": high,
        "metavar": metavar,
        "paths": paths,
        "secret": secret,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class _Config:
    """What configs share: fields are checked, and may come from the environment."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, _parse(item, getattr(self, item.name)))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Build a config from `SLIPSTREAM_*` variables, explicit arguments going first.

        Args:
            environ: variables to read; the process's own by default.
            overrides: field values; None means not given.

        Raises:
            ConfigError: an unknown variable or field (the nearest is named), or a bad value.
        """
        environ = os.environ if environ is None else environ
        names = [item.name for item in dataclasses.fields(cls)]
        values: dict[str, Any] = {}
        for key, text in environ.items():
            if not key.startswith(PREFIX) or key in OTHER_VARIABLES:
                continue
            name = key[len(PREFIX) :].lower()
            if name not in _all_settings() or key != key.upper():
                known = [PREFIX + n.upper() for n in _all_settings()] + list(OTHER_VARIABLES)
                raise ConfigError(f"unknown variable {key}", hint=nearest(key, known))
            if name in names:
                values[name] = text
        for name, value in overrides.items():
            if name not in names:
                raise ConfigError(f"unknown setting {name}", hint=nearest(name, names))
            if value is not None:
                values[name] = value
        for item in dataclasses.fields(cls):
            # An unset variable in a script must not open what a key would have closed.
            if item.metadata["metavar"] and not str(values.get(item.name, "x")).strip():
                raise ConfigError(f"{item.name} must not be empty", hint="leave it out")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(_Config):
    """Settings of one engine. Strings "auto" are settled when the model is loaded."""

    k: KSetting = _setting("auto", f"drafted tokens a round: auto, off or 0 to {MAX_K}")
    max_k: int = _setting(MAX_K, "most drafted tokens a round, whatever k is", high=MAX_K)
    drafter: str = _setting(
        "auto",
        "what proposes tokens: auto, none, ngram, assistant (one that is shipped for the model) or "
        "the path, with a /, of an assistant's folder",
        choices=("auto", "none", "ngram", "assistant"),
        paths=True,
    )
    device: str = _setting(
        "auto", "back end that runs the model", choices=("auto", "cpu", "cuda", "reference")
    )
    isa: str = _setting(
        "auto", "instruction path of the cpu back end", choices=("auto", "avx512", "portable")
    )
    threads: int = _setting(
        0, "threads of the cpu back end; 0 takes the cores this process may use", high=256
    )
    max_model_len: int = _setting(0, "longest context in tokens; 0 takes the model's own")
    max_num_seqs: int = _setting(8, "sequences that run at once", low=1, high=4096)
    max_batch_rows: int = _setting(
        0,
        "rows of one forward; 0 takes a prefill chunk and the widest round of every sequence",
        high=1 << 16,
    )
    kv_tokens: int = _setting(
        0, "tokens that the KV cache holds; 0 takes one full context, or 4096 a sequence if more"
    )
    memory_fraction: float = _setting(
        0.9, "share of the GPU's memory for weights, work space and KV", low=0.05, high=1
    )
    prefix_cache: str = _setting(
        "on", "keep the KV of finished text for prompts that begin with it", choices=("on", "off")
    )
    prefill_chunk: int = _setting(
        256, "prompt tokens of one forward, of all sequences together", low=1, high=1 << 16
    )
    verify_pad: str = _setting("auto", "pad verify rows: auto, off or a multiple, e.g. 8")
    verify_kernel: str = _setting(
        "auto",
        "how verify rows share weight reads",
        choices=("auto", "gemv", "multirow", "tile"),
    )
    profile: str = _setting(
        "on",
        "read and keep what was measured about a model and its drafter",
        choices=("on", "off"),
    )
    tile_m: int = _setting(16, "rows of one tile when verify_kernel is tile", low=1, high=256)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.k, int) and self.k > self.max_k:
            raise ConfigError(f"k must be in [0, max_k], got {self.k} with max_k {self.max_k}")

    @property
    def k_ceiling(self) -> int:
        """Largest k that a round may have."""
        return min(k_ceiling(self.k), self.max_k)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(_Config):
    """Settings of the HTTP server around an engine."""

    host: str = _setting("127.0.0.1", "address to listen on", metavar="ADDRESS")
    port: int = _setting(8000, "port to listen on; 0 takes a free one", high=65535)
    api_key: str = _setting(
        "",
        "key that requests must bring, as 'Authorization: Bearer KEY'",
        metavar="KEY",
        secret=True,
    )
    served_model_name: str = _setting(
        "", "what requests call the model; its name or file name by default", metavar="NAME"
    )
    speculative_config: str = _setting(
        "",
        "JSON object with method, model and num_speculative_tokens (most drafted tokens a round)",
        metavar="JSON",
    )
    max_queue: int = _setting(
        64, "replies that may wait for a place; more are answered 429", high=1 << 16
    )
    max_body_bytes: int = _setting(4 << 20, "longest request body", low=1 << 10, high=1 << 30)
    default_max_tokens: int = _setting(
        1024, "longest chat reply where the request does not say", low=1
    )
    max_reply_tokens: int = _setting(
        0, "longest reply that a request may ask for; 0 leaves it to the context"
    )
    request_timeout: int = _setting(
        600, "seconds that a request may take, waiting included", low=1, high=1 << 20
    )
    receive_timeout: int = _setting(
        30, "seconds that a client may take to send a request", low=1, high=1 << 20
    )
    shutdown_timeout: int = _setting(
        30, "seconds that running requests may go on after a signal to stop", high=1 << 20
    )


def parse_k(value: Any) -> KSetting:
    """Return k as "auto", "off" or an int in [0, MAX_K].

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, str) and value in ("auto", "off"):
        return value  # type: ignore[return-value]
    number = _integer(value)
    if number is None or not 0 <= number <= MAX_K:
        raise ConfigError(f"k must be auto, off or in [0, {MAX_K}], got {value}")
    return number


def k_ceiling(k: KSetting) -> int:
    """Return the largest k that a setting allows."""
    return k if isinstance(k, int) else 0 if k == "off" else MAX_K


def is_path(value: str) -> bool:
    """Tell whether a setting that takes words and paths is given a path."""
    return "/" in value or os.sep in value


def _parse(item: dataclasses.Field[Any], value: Any) -> Any:
    """Check one field's value, text from the environment included."""
    if item.name == "k":
        return parse_k(value)
    if item.name == "verify_pad":
        number = _integer(value)
        if value in ("auto", "off") or (number is not None and 1 <= number <= 256):
            return str(value)
        raise ConfigError(f"verify_pad must be auto, off or in [1, 256], got {value}")
    low, high = item.metadata["low"], item.metadata["high"]
    if isinstance(item.default, float):
        share = _decimal(value)
        if share is None or not low <= share <= high:
            raise ConfigError(f"{item.name} must be a number in [{low}, {high}], got {value}")
        return share
    if isinstance(item.default, int):
        number = _integer(value)
        if number is None or not low <= number <= high:
            raise ConfigError(f"{item.name} must be an integer in [{low}, {high}], got {value}")
        return number
    choices, paths = item.metadata["choices"], item.metadata["paths"]
    if item.metadata["secret"]:
        return _secret(item.name, value)
    if item.metadata["metavar"]:
        return _text(item.name, value)
    if value not in choices and not (paths and isinstance(value, str) and is_path(value)):
        also = " or a path" if paths else ""
        raise ConfigError(f"{item.name} must be one of {', '.join(choices)}{also}, got {value}")
    return value


def _all_settings() -> list[str]:
    return [item.name for kind in _Config.__subclasses__() for item in dataclasses.fields(kind)]


def _text(name: str, value: Any) -> str:
    if isinstance(value, str) and value.isprintable() and value.isascii():
        return value
    raise ConfigError(f"{name} must be printable ASCII text, got {value!r}")


def _secret(name: str, value: Any) -> str:
    """Return a text that no message repeats; spaces would be lost in a header."""
    if isinstance(value, str) and re.fullmatch(r"[!-~]*", value):
        return value
    raise ConfigError(f"{name} must be printable ASCII text without spaces, got something else")


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    plain = isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value)
    return int(value) if plain else None


def _decimal(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    plain = isinstance(value, str) and re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,9}", value)
    return float(value) if plain else None


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a hint: the known name nearest to a wrong one, or all of them."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {match[0]}?" if match else f"known: {', '.join(known)}"
