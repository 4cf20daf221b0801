"""A tiny target on any back end with a draft model, an assistant or neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.config import EngineConfig
from slipstream.drafters.draft_model import DraftModel
from slipstream.engine.draft_model import DraftSource
from slipstream.engine.engine import Engine
from slipstream.engine.load import choose_drafters
from slipstream.engine.pages import PagePool
from slipstream.engine.target import build_target
from tests.drafting import make_assistant
from tests.fake_model import FakeTokenizer
from tests.tiny import TinyTensors, make_backend, tiny_arch, tiny_tensors, tiny_weights

ARCH = tiny_arch(context_len=128)
DRAFTS: dict[str, Callable[[], TinyTensors]] = {
    "itself": lambda: tiny_tensors(ARCH),
    "close": lambda: tiny_tensors(ARCH, kind="f16"),
    "other": lambda: tiny_tensors(tiny_arch(num_layers=1, context_len=128), seed=7),
}


def tiny_engine(
    backend_name: str, *, draft: str = "close", paid: str = "draft_model", **settings: Any
) -> Engine:
    """Return an engine whose target has a draft model, an assistant or neither.

    Args:
        draft: which draft model.
        paid: "draft_model", "assistant" or "none"; with `drafter="ngram+x9"` lookups draft as well.
    """
    threads = settings.pop("threads", 0)
    arch = settings.pop("draft_arch", None)
    tensors = tiny_tensors(ARCH)
    drafting = tiny_tensors(arch, seed=7) if arch else DRAFTS[draft]()
    named = {"none": "none", "assistant": "assistant", "draft_model": "x9"}[paid]
    config = EngineConfig(**({"drafter": named} | settings))
    options = {"threads": threads} if backend_name.startswith("cpu") else {}
    target = build_target(
        ARCH,
        make_backend(backend_name, **options),
        lambda backend: tiny_weights(backend, tensors),
        config,
        assistant=make_assistant(ARCH) if paid == "assistant" else None,
        draft=DraftSource(
            arch=drafting.arch, load_weights=lambda backend: tiny_weights(backend, drafting)
        )
        if paid == "draft_model"
        else None,
    )
    makers = choose_drafters(config, target)
    return Engine(target, FakeTokenizer(), config=config, make_drafters=makers)


def head_of(engine: Engine) -> DraftModel:
    head = engine.target.head
    assert isinstance(head, DraftModel)
    return head


def pages_of(engine: Engine) -> PagePool:
    """Return the pages of an engine's draft model."""
    pool = head_of(engine).pages
    assert isinstance(pool, PagePool)
    return pool


def num_taken(engine: Engine) -> tuple[int, int]:
    """Return the pages that sequences have, of target and draft model."""
    return engine.pages.num_taken, pages_of(engine).num_taken
