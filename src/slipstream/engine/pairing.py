"""A target's pairing with its drafters: the policy of its rounds, and where that is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import EngineConfig
from slipstream.drafters.base import Drafter
from slipstream.engine.round import padding_multiple
from slipstream.policy.base import Policy
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.fixed import Off
from slipstream.policy.profile import ProfileKey, save_profile
from slipstream.types import KSetting

MakeDrafter = Callable[[], Drafter]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Pairing:
    """What one target and its kinds of drafters have learned about each other.

    Attributes:
        make_drafters: each returns a fresh drafter for a request; one free drafter and one paid one
            at most, none never drafts.
        policy: None where nothing will ever be drafted.
        folder, key: where the profile is kept; None keeps none.
        profile: what the profile's state is, for reports.
        doubted_costs: times of the profile that did not hold when this run began.
    """

    make_drafters: Sequence[MakeDrafter]
    policy: MeasuredPolicy | None
    folder: Path | None = None
    key: ProfileKey | None = None
    profile: str = "none: nothing is kept"
    doubted_costs: Mapping[str, Any] | None = None

    @classmethod
    def fresh(cls, config: EngineConfig, make_drafters: Sequence[MakeDrafter] = ()) -> Pairing:
        """Return a pairing that has learned nothing yet."""
        ceiling = config.k_ceiling
        if not make_drafters or ceiling == 0:
            return cls(make_drafters=make_drafters, policy=None, profile="none: nothing drafts")
        free = [_is_free(make_drafter) for make_drafter in make_drafters]
        assert max(free.count(True), free.count(False)) == 1, "two drafters of one kind"
        policy = MeasuredPolicy(paid=False in free, max_k=ceiling, pad_to=padding_multiple(config))
        return cls(make_drafters=make_drafters, policy=policy)

    @property
    def path(self) -> Path | None:
        """The profile's file, which need not exist."""
        if self.folder is None or self.key is None:
            return None
        return self.folder / self.key.file_name

    def drafter_state(self) -> tuple[str, str | None]:
        """Return the drafters' names, "none" for none, and why one cannot be made."""
        names, failure = [], None
        for make_drafter in self.make_drafters:
            try:
                names.append(make_drafter().name)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}".rstrip(": ")
        return "+".join(names) or "none", failure

    def save(self) -> bool:
        """Write the profile, if one is kept; where that fails, one line in the log says so.

        Returns:
            Whether it is kept now.
        """
        if self.policy is None or self.folder is None or self.key is None:
            return False
        try:
            save_profile(self.folder, self.key, self.policy, doubted_costs=self.doubted_costs)
        except OSError as error:
            _log.warning("the profile cannot be written: %s", error)
            return False
        return True

    def policy_of(self, number: int, k: KSetting, *, drafter: str, ceiling: int) -> Policy:
        """Return the policy of one request.

        Args:
            number: tells requests apart.
            k: the setting in force.
            drafter: what reports call the request's drafters, "none" for none.
            ceiling: largest k that engine, drafter and request allow; an integer k is within it.
        """
        mode = k if isinstance(k, str) else f"fixed:{k}" if k else "off"
        if k in ("off", 0):
            return Off(mode=mode, reason="off: no drafting was asked for")
        if drafter == "none":
            return Off(mode=mode, reason="off: there is no drafter")
        if ceiling == 0 or self.policy is None:
            return Off(mode=mode, reason="off: the engine's own k is 0")
        return self.policy.request(number, k if isinstance(k, int) else None)


def _is_free(make_drafter: MakeDrafter) -> bool:
    """Tell whether drafting costs next to nothing; a drafter that cannot be made is not asked."""
    try:
        return make_drafter().free
    except Exception:
        return False
