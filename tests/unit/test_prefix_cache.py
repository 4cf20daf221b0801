"""The prefix cache: what is reused, what never is, and what goes first when pages run out."""

from __future__ import annotations

import pytest

from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.pages import PagePool
from slipstream.engine.prefix import PrefixCache
from slipstream.engine.sequence import TokenSequence
from slipstream.types import SamplingParams
from tests.engine_checks import check_engine, nodes_of
from tests.fake_model import FakeKV, Scripted, always_wrong, continuation, fake_engine, forwards

PROMPT = [(7 * i) % 97 for i in range(100)]


def ask(engine: Engine, prompt: list[int], max_tokens: int = 10) -> int:
    """Serve a prompt, check the reply, and return how much of the prompt was cached."""
    before = engine.stats.cached_tokens
    (reply,) = engine.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert reply.token_ids == continuation(prompt, max_tokens)
    check_engine(engine)
    return engine.stats.cached_tokens - before


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 100])
def test_a_second_run_computes_the_last_token_and_its_page_only(length: int) -> None:
    engine = fake_engine()
    prompt = PROMPT[:length]
    assert ask(engine, prompt) == 0
    assert ask(engine, prompt) == (length - 1) // 16 * 16
    rows = [len(step.token_ids) for step in forwards(engine)]
    assert rows[10] == length - (length - 1) // 16 * 16


@pytest.mark.parametrize("drafter", [None, NGramDrafter, lambda: Scripted([], always_wrong)])
def test_a_conversation_reuses_its_replies(drafter: object) -> None:
    # Speculation must not cost the last page.
    engine = fake_engine(drafter=drafter, max_model_len=512)  # type: ignore[arg-type]
    text = PROMPT[:40]
    for _ in range(4):
        cached = ask(engine, text, 24)
        text = [*text, *continuation(text, 24), 5, 6]
        # All full pages of what was said before, whose last token has no KV yet.
        assert cached in (0, (len(text) - 26 - 3) // 16 * 16)
    assert engine.stats.cached_tokens > 100


def test_rejected_drafts_never_enter() -> None:
    engine = fake_engine(drafter=lambda: Scripted(PROMPT * 9, always_wrong), max_model_len=512)
    ask(engine, PROMPT[:30], 120)  # check_engine compares every cached page with its ids
    assert engine.pages.cache is not None
    assert len(nodes_of(engine.pages.cache.root)) == (30 + 120 - 1) // 16


def test_prompts_with_one_beginning_share_its_pages_while_both_run() -> None:
    engine = fake_engine()
    first = engine.submit([*PROMPT[:64], 1, 2], SamplingParams(max_tokens=20))
    engine.step()
    second = engine.submit([*PROMPT[:64], 3, 4], SamplingParams(max_tokens=20))
    engine.step()
    tables = {r.id: r.sequence.pages.tolist() for r in engine._scheduler}
    assert tables[first][:4] == tables[second][:4]
    assert tables[first][4] != tables[second][4]
    check_engine(engine)
    engine.cancel(first)
    check_engine(engine)
    ids = []
    while engine.num_requests:
        ids += [i for output in engine.step() for i in output.chunk.token_ids]
    assert ids == continuation([*PROMPT[:64], 3, 4], 20)[1:]


def test_a_beginning_that_is_being_written_is_waited_for_and_not_computed_twice() -> None:
    engine = fake_engine(prefill_chunk=32)
    engine.generate([[*PROMPT[:64], i] for i in range(4)], SamplingParams(max_tokens=1))
    assert sum(len(rows.token_ids) for rows in forwards(engine)) == 65 + 3
    # Whoever waited goes on by itself once the first is gone.
    first = engine.submit(PROMPT[::-1], SamplingParams(max_tokens=1))
    engine.submit(PROMPT[::-1], SamplingParams(max_tokens=1))
    engine.step()
    engine.cancel(first)
    ids = []
    while engine.num_requests:
        ids += [i for output in engine.step() for i in output.chunk.token_ids]
        check_engine(engine)
    assert ids == continuation(PROMPT[::-1], 1)


def test_off_means_that_nothing_is_kept() -> None:
    engine = fake_engine(prefix_cache="off")
    assert ask(engine, PROMPT) == ask(engine, PROMPT) == 0
    assert engine.pages.cache is None


def test_other_ids_before_a_page_are_another_page() -> None:
    engine = fake_engine()
    ask(engine, PROMPT)
    assert ask(engine, [PROMPT[0] + 1, *PROMPT[1:]]) == 0
    assert ask(engine, [*PROMPT[:32], 1, *PROMPT[33:]]) == 32


class Collision(int):
    """An id that hashes like every other."""

    def __hash__(self) -> int:
        return 1


def test_colliding_hashes_find_nothing() -> None:
    cache = PrefixCache()
    node = cache.add(cache.root, tuple(map(Collision, range(16))), 0)
    other = tuple(map(Collision, range(1, 17)))
    assert hash(other) == hash(node.token_ids)
    assert other not in cache.root.children


def test_the_least_recently_held_goes_first_and_a_prefix_after_what_follows_it() -> None:
    engine = fake_engine(kv_tokens=12 * 16)
    a, b, c = ([start, *PROMPT[1:50]] for start in (1, 2, 3))  # three full pages each
    for prompt in (a, b):
        ask(engine, prompt, 1)
    ask(engine, a, 1)  # a is younger than b now
    ask(engine, c, 1)
    ask(engine, [*c, *c], 1)  # takes what c has, three free pages and b's last
    assert ask(engine, a[:49], 1) == 48
    assert ask(engine, b[:49], 1) == 32


def test_idle_pages_never_stand_in_the_way_of_admission() -> None:
    engine = fake_engine(kv_tokens=12 * 16, max_num_seqs=2)
    for start in range(20):
        prompt = [start, *PROMPT[:90]]
        assert ask(engine, prompt, 100) == 0  # 12 pages: all there are


def test_cached_pages_count_towards_a_request_that_would_not_fit_without_them() -> None:
    engine = fake_engine(kv_tokens=10 * 16)
    prompt = PROMPT[:97]  # seven pages with its tokens, six of them full
    first = engine.submit(prompt, SamplingParams(max_tokens=10))
    second = engine.submit(prompt, SamplingParams(max_tokens=10))
    ids: dict[int, list[int]] = {first: [], second: []}
    together = 0
    while engine.num_requests:
        outputs = engine.step()
        together += len(outputs) == 2
        for output in outputs:
            ids[output.request_id] += output.chunk.token_ids
        check_engine(engine)
    assert ids[first] == ids[second] == continuation(prompt, 10)
    assert together > 0


def test_a_page_that_another_published_first_takes_the_place_of_ours() -> None:
    kv = FakeKV(8)
    pool = PagePool(kv, cache=PrefixCache())
    one, two = TokenSequence(PROMPT[:20]), TokenSequence(PROMPT[:20])
    for sequence in (one, two):
        sequence.reserve(20, pool)
        sequence.extend_kv(20)
    kv.tokens[one.pages[0]] = kv.tokens[two.pages[0]] = PROMPT[:16]
    one.publish(pool)
    two.publish(pool)
    assert one.pages[0] == two.pages[0]
    assert one.pages[1] != two.pages[1]
    assert pool.num_taken == 3
    one.release()
    two.release()
    assert (pool.num_taken, pool.num_free) == (0, 8)
