"""What a pairing has learned, kept on disk between runs.

A profile is keyed by everything its numbers depend on: hashes of target and drafter, device, driver
and kernel build. It is written beside its place and moved there, so a reader never sees half of
one. A file that is damaged, of another version or for another key is ignored with one line in the
log; a start never fails because of it. Before it is used, two widths are timed again: a profile
that no longer tells the truth is set aside.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.profile_check import is_sound

VERSION = 2
LARGEST = 1 << 20  # bytes; real ones have a few thousand
# How far a width may be from its profile: clocks and neighbours move times by 10 %, another kernel
# or device by 30 % and more.
SENTINEL_TOLERANCE = 0.25
# Row counts that are timed: the classic step, and a verify of the commonest width.
SENTINEL_ROWS = (1, 4)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """What a profile's numbers depend on; contents, not names."""

    target: str
    drafter: str
    device: str
    driver: str
    kernels: str

    @property
    def file_name(self) -> str:
        """Name of the profile's file, the same for the same key."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A profile that was read.

    Attributes:
        costs: what it says of times, as JSON values.
        doubted: the run before this one found that they do not hold.
    """

    costs: Mapping[str, Any]
    doubted: bool


def save_profile(
    folder: Path,
    key: ProfileKey,
    policy: MeasuredPolicy,
    *,
    doubted_costs: Mapping[str, Any] | None = None,
) -> Path:
    """Write what a policy has learned and return the file.

    Args:
        doubted_costs: kept in place of the policy's own, which may be those of one busy minute;
            the next run that doubts them as well replaces them.

    Raises:
        OSError: the folder cannot be written; an older profile is still whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / key.file_name
    state, doubted = policy.snapshot(), doubted_costs is not None
    if doubted:
        state["cost"] = doubted_costs
    content = {"version": VERSION, "key": asdict(key), "state": state, "doubted": doubted}
    text = json.dumps(content, indent=1, allow_nan=False)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".profile-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return path


def load_profile(folder: Path, key: ProfileKey, policy: MeasuredPolicy) -> Found | None:
    """Restore a policy from its profile and return it, None if there is none that can be used.

    The policy is untouched then.
    """
    path = folder / key.file_name
    try:
        content = _read(path)
        problem = _problem(content, key)
        if problem is None:
            state = content["state"]
            policy.restore(state)
            return Found(costs=state["cost"], doubted=content.get("doubted") is True)
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = error.strerror or "it cannot be read"
    except (ValueError, RecursionError):
        problem = "it is damaged"
    _log.warning("profile %s is ignored: %s", path, problem)
    return None


def read_profile(folder: Path, key: ProfileKey) -> dict[str, Any]:
    """Return a profile file's content, to be shown.

    Raises:
        ConfigError: there is none, or it is damaged, of another version or for another key.
    """
    path = folder / key.file_name
    try:
        content = _read(path)
        problem = _problem(content, key)
        if problem is None:
            return dict(content)
    except OSError as error:
        raise ConfigError(
            f"there is no profile to read: {path}: {error.strerror}",
            hint="slipstream profile MODEL measures one",
        ) from error
    except (ValueError, RecursionError):
        problem = "it is damaged"
    raise ConfigError(f"cannot read the profile {path}: {problem}")


def passes_sentinel(policy: MeasuredPolicy, measure: Callable[[int], float | None]) -> bool:
    """Tell whether a restored policy still tells the truth about this machine.

    Args:
        measure: times a forward of so many rows, at a short context, and returns seconds; the
            best of a few runs; None where there is no room for them.
    """
    for rows in SENTINEL_ROWS:
        expected = policy.cost.verify.time_s(rows, 0)
        measured = None if expected is None else measure(rows)
        if expected is None or measured is None:
            continue
        if abs(measured - expected) > SENTINEL_TOLERANCE * expected:
            _log.info(
                "the profile is set aside: %d rows take %.2f ms, it says %.2f ms",
                rows,
                1e3 * measured,
                1e3 * expected,
            )
            return False
    return policy.cost.verify.widest > 0


def _read(path: Path) -> Any:
    """Return a file's content as JSON values; only a plain file of sensible size is opened.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or no JSON.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
        raise ValueError("no profile")
    return json.loads(path.read_text(encoding="utf-8"))


def _problem(content: Any, key: ProfileKey) -> str | None:
    """Return what is wrong with a file's content, None if nothing is."""
    if not isinstance(content, dict) or not isinstance(content.get("state"), dict):
        return "it is damaged"
    if content.get("version") != VERSION:
        return f"its version is {content.get('version')!r}, not {VERSION}"
    if content.get("key") != asdict(key):
        return "it belongs to another pairing or device"
    return None if is_sound(content["state"]) else "it is damaged"
