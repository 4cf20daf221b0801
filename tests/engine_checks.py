"""What must hold of an engine between any two steps."""

from __future__ import annotations

from collections import Counter

from slipstream.engine.engine import Engine
from slipstream.engine.pages import PagePool, pages_for
from slipstream.engine.prefix import Node
from slipstream.kernels.ops import PAGE_SIZE
from tests.fake_model import FakeKV


def check_engine(engine: Engine) -> None:
    """Check pages, lengths, promises and the prefix cache."""
    pool, running = engine.pages, engine._scheduler._running
    assert len(running) <= engine.config.max_num_seqs
    holders: Counter[int] = Counter()
    for request in running:
        sequence = request.sequence
        pages = sequence.pages.tolist()
        assert len(set(pages)) == len(pages)
        holders.update(pages)
        assert pages_for(sequence.kv_len) <= len(pages) <= request.max_pages
        if sequence.num_generated:
            assert sequence.kv_len == len(sequence.token_ids) - 1
            assert request.remaining >= 1
        if request.history is not None:
            assert request.history.token_ids == sequence.token_ids
    for request in engine._scheduler._waiting:
        assert not len(request.sequence.pages)
    assert holders == Counter(pool._holders)
    assert pool.num_taken + pool.num_free == pool.num_pages
    promised = sum(r.max_pages - len(r.sequence.pages) for r in running)
    assert promised <= pool.num_free
    check_cache(pool)
    if pool.cache is not None and isinstance(engine.target.kv, FakeKV):
        for node in nodes_of(pool.cache.root):
            assert engine.target.kv.tokens[node.page].tolist() == list(node.token_ids)


def check_cache(pool: PagePool) -> None:
    """Check that shared pages are cached ones, and who holds which."""
    if pool.cache is None:
        assert not any(count > 1 for count in pool._holders.values())
        return
    cached = nodes_of(pool.cache.root)
    assert {node.page for node in cached} == set(pool.cache._nodes)
    assert len(cached) == len(pool.cache._nodes)
    assert set(pool.cache._idle) == set(pool.cache._nodes) - set(pool._holders)
    assert not set(pool._free) & (set(pool.cache._nodes) | set(pool._holders))
    for page, count in pool._holders.items():
        assert count == 1 or page in pool.cache
    for node in cached:
        assert len(node.token_ids) == PAGE_SIZE
        if node.page in pool._holders and node.parent is not None and node.parent.page >= 0:
            assert node.parent.page in pool._holders


def nodes_of(root: Node) -> list[Node]:
    """Return all nodes below the root."""
    found, left = [], list(root.children.values())
    while left:
        node = left.pop()
        found.append(node)
        left += node.children.values()
    return found
