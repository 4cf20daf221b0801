"""What is compared: an arm is a k under a verify variant; classic decoding is the arm k = 0."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.config import EngineConfig, parse_k
from slipstream.errors import ConfigError
from slipstream.types import KSetting

CLASSIC = "classic"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How verify rows share weight reads and are padded; each variant has its own compiled step."""

    verify_kernel: str = "auto"
    verify_pad: str = "auto"
    tile_m: int = 16

    @property
    def name(self) -> str:
        """What tables call it."""
        tile = f" {self.tile_m}" if self.verify_kernel == "tile" else ""
        return f"{self.verify_kernel}{tile}, pad {self.verify_pad}"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to decode.

    Attributes:
        k: 0 for classic decoding, a fixed number of drafted tokens, or "auto".
        variant: None for the engine of a peer.
        peer: the peer's name, "" for our own engine.
    """

    k: KSetting | None
    variant: Variant | None
    peer: str = ""

    @property
    def is_classic(self) -> bool:
        """Whether nothing is drafted."""
        return self.k == 0

    @property
    def name(self) -> str:
        """What tables call it among arms of one variant."""
        if self.peer:
            return self.peer
        return CLASSIC if self.k == 0 else "auto" if self.k == "auto" else f"k={self.k}"


def parse_k_values(text: str) -> list[KSetting]:
    """Return the k of each arm: classic first, each once, in the order given.

    Raises:
        ConfigError: an item is not auto, off or a number of tokens.
    """
    values: list[KSetting] = [0]
    for item in listed(text, "--k-values"):
        k = parse_k(item)
        if (0 if k == "off" else k) not in values:
            values.append(k)
    if len(values) == 1:
        raise ConfigError(
            f"--k-values must name something to compare with classic decoding, got {text}",
            hint="e.g. --k-values 3,auto",
        )
    return values


def parse_variants(config: EngineConfig, kernels: str, pads: str, tiles: str) -> list[Variant]:
    """Return every combination of the axes, each once; tile_m matters to the tile kernel only.

    Args:
        config: what an empty axis stays at.

    Raises:
        ConfigError: an item is wrong.
    """
    axes = (
        listed(kernels, "--verify-kernel") if kernels else [config.verify_kernel],
        listed(pads, "--verify-pad") if pads else [config.verify_pad],
        listed(tiles, "--tile-m") if tiles else [str(config.tile_m)],
    )
    variants: list[Variant] = []
    for kernel, pad, tile in itertools.product(*axes):
        # The config checks the values, and makes numbers of texts.
        checked = EngineConfig(verify_kernel=kernel, verify_pad=pad, tile_m=tile)  # type: ignore[arg-type]
        if pad.isdecimal():  # a tile that is a multiple of it is padded further anyway
            redundant = kernel == "tile" and checked.tile_m % int(pad) == 0
            pad = "off" if redundant else str(int(pad))
        variant = Variant(
            verify_kernel=kernel,
            verify_pad=pad,
            tile_m=checked.tile_m if kernel == "tile" else Variant.tile_m,
        )
        if variant not in variants:
            variants.append(variant)
    return variants


def arms_of(k_values: Sequence[KSetting], variants: Sequence[Variant]) -> list[Arm]:
    """Return the arms of every variant, a variant's arms side by side, classic first."""
    return [Arm(k=k, variant=variant) for variant in variants for k in k_values]


def listed(text: str, flag: str) -> list[str]:
    """Return the items of a flag that is a list.

    Raises:
        ConfigError: one is empty.
    """
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ConfigError(f"{flag} is a list separated by commas, got {text!r}")
    return items
