"""An engine around a model that is a few lines of numpy: engine tests in milliseconds, no torch.

The model's "KV" is the token ids themselves, kept in pages; its choice after a row is a hash of all
tokens that the row reads back. A wrong page, a stale position or a lost write changes the text.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from slipstream.config import EngineConfig
from slipstream.drafters.base import Drafter
from slipstream.engine.engine import Engine
from slipstream.engine.pages import pages_for
from slipstream.engine.target import Target, auto_kv_tokens
from slipstream.kernels.ops import PAGE_SIZE, Backend, Rows, StepResult
from tests.tiny import ARCH

VOCAB = ARCH.vocab_size
_SLOPE = np.linspace(-3, 3, VOCAB, dtype=np.float32)


class FakeKV:
    """Pages of token ids; a fresh page is zero."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.tokens = np.full((num_pages, PAGE_SIZE), -7, np.int32)

    def layer(self, index: int) -> Any:
        raise NotImplementedError

    def read(self, layer: int, page: int) -> Any:
        raise NotImplementedError

    def zero(self, pages: Sequence[int]) -> None:
        self.tokens[list(pages)] = 0


class FakeStep:
    """The forward. `log` keeps the rows of every call; `after` runs once per call."""

    def __init__(self, kv: FakeKV, after: Callable[[], None]) -> None:
        self.kv = kv
        self.after = after
        self.log: list[Rows] = []

    def __call__(self, rows: Rows) -> StepResult:
        self.log.append(rows)
        for r, position in enumerate(rows.positions):
            if position >= 0:
                page = rows.page_table[rows.sequences[r], position // PAGE_SIZE]
                self.kv.tokens[page, position % PAGE_SIZE] = rows.token_ids[r]
        logits = np.zeros((len(rows.logit_rows), VOCAB), np.float32)
        for row, r in zip(logits, rows.logit_rows, strict=True):
            row[:] = next_logits(self._context(rows, r))
        self.after()
        return StepResult(logits=logits, argmax=logits.argmax(axis=1).astype(np.int32))

    def _context(self, rows: Rows, r: int) -> Any:
        length = int(rows.positions[r]) + 1
        pages = rows.page_table[rows.sequences[r], : pages_for(length)]
        return self.kv.tokens[pages].reshape(-1)[:length]


def next_logits(context: Sequence[int]) -> Any:
    """Return the fake model's logits after a context, float32 of shape (V,), largest 4."""
    digest = zlib.crc32(np.asarray(context, np.int32).tobytes())
    favourite = digest % VOCAB if digest % 5 == 0 else (int(context[-1]) * 3 + 1) % VOCAB
    logits = np.roll(_SLOPE, digest % VOCAB)
    logits[favourite] = 4
    return logits


def next_token(context: Sequence[int]) -> int:
    """Return the fake model's choice after a context: mostly a pattern, sometimes a surprise."""
    return int(next_logits(context).argmax())


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Return what the fake model says after a prompt, token by token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class FakeDetokenizer:
    """Spells ids in angle brackets and holds the last one back."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        text = self.held + "".join(f"<{i}>" for i in token_ids)
        cut = text.rfind("<")
        self.held = text[cut:] if cut >= 0 else ""
        return text[: len(text) - len(self.held)]

    def finish(self) -> str:
        held, self.held = self.held, ""
        return held


class FakeTokenizer:
    """One id per character."""

    def __init__(self, stop_ids: Sequence[int] = ()) -> None:
        self.stop_ids = frozenset(stop_ids)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        return [ord(c) % VOCAB for c in text]

    def has_more_ids(self, text: str, limit: int) -> int:
        return 0

    def detokenizer(self) -> FakeDetokenizer:
        return FakeDetokenizer()


class Scripted:
    """Replays a known text with wrong tokens at given places of each proposal.

    Args:
        script: prompt and continuation.
        is_wrong: says for (round, place in the proposal) whether to propose a wrong token.
        width: most tokens it offers.
    """

    name = "scripted"
    max_k = 15

    def __init__(
        self,
        script: Sequence[int],
        is_wrong: Callable[[int, int], bool] = lambda _round, _place: False,
        *,
        free: bool = False,
        width: int = 15,
        on_propose: Callable[[], None] = lambda: None,
    ) -> None:
        self.script = list(script)
        self.is_wrong = is_wrong
        self.free = free
        self.width = width
        self.on_propose = on_propose
        self.rounds = 0
        self.observed: list[tuple[list[int], int]] = []
        self.num_released = 0

    def propose(self, token_ids: Sequence[int], k: int) -> list[int]:
        self.on_propose()
        at = len(token_ids)
        ahead = self.script[at : at + min(k, self.width)]
        self.rounds += 1
        return [
            (token + 1) % VOCAB if self.is_wrong(self.rounds, place) else token
            for place, token in enumerate(ahead)
        ]

    def observe(self, proposed: Sequence[int], accepted: int) -> None:
        self.observed.append((list(proposed), accepted))

    def release(self) -> None:
        self.num_released += 1


def always_wrong(_round: int, _place: int) -> bool:
    """Make every proposal wrong from its first token on."""
    return True


def fake_engine(
    *,
    drafter: Callable[[], Drafter] | None = None,
    stop_ids: Sequence[int] = (),
    max_model_len: int = 256,
    clock: Callable[[], float] = lambda: 0.0,
    after_forward: Callable[[], None] = lambda: None,
    template: Any = None,
    **settings: Any,
) -> Engine:
    """Return an engine around the fake model."""
    config = EngineConfig(**settings)
    kv_tokens = config.kv_tokens or auto_kv_tokens(max_model_len, config.max_num_seqs)
    kv = FakeKV(pages_for(kv_tokens))
    target = Target(
        arch=ARCH,
        backend=cast("Backend", None),
        kv=kv,
        step=FakeStep(kv, after_forward),
        max_model_len=max_model_len,
    )
    return Engine(
        target,
        FakeTokenizer(stop_ids),
        template=template,
        config=config,
        make_drafters=[drafter] if drafter else (),
        clock=clock,
    )


def forwards(engine: Engine) -> list[Rows]:
    """Return the rows of every forward that a fake engine ran."""
    step = engine.target.step
    assert isinstance(step, FakeStep)
    return step.log
