"""What a scripted drafter replays in a benchmark: the group that runs and its classic replies."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence

from slipstream.drafters.scripted import ScriptedDrafter, ScriptedSpec


class Scripts:
    """Prompt and classic reply of each prompt of a group; empty before the first reply."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def set(self, prompts: Sequence[list[int]], replies: Sequence[list[int]]) -> None:
        """Take a group's texts in place of those of the group before."""
        self.texts = [[*prompt, *ids] for prompt, ids in zip(prompts, replies, strict=True)]

    def maker(self, spec: ScriptedSpec, vocab_size: int) -> Callable[[], ScriptedDrafter]:
        """Return what makes a drafter of the present group.

        It is wrong at the same places for every arm, and at other places in every group.
        """

        def make() -> ScriptedDrafter:
            seed = (spec.seed + zlib.crc32(repr(self.texts).encode())) % 2**64
            own = dataclasses.replace(spec, seed=seed)
            return ScriptedDrafter(self.texts, own, vocab_size=vocab_size)

        return make
