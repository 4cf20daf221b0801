"""A row's logits are the same bytes wherever the row stands and whoever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tiny import BACKENDS, KINDS, TinyModel, make_backend, make_rows, tiny_model, tiny_tensors

CONTEXT = 37  # two full pages and a part of a third
MY_PAGES, OTHER_PAGES = [5, 2, 9, 4], [1, 7, 3, 6]
PROBE = 11  # the token of the row under test, at position CONTEXT


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


def prefill(model: TinyModel, seed: int, pages: list[int], length: int, chunk: int = 64) -> None:
    """Write the KV of a random prompt of `length` tokens, `chunk` rows at a time."""
    ids = np.random.default_rng(seed).integers(0, model.arch.vocab_size, length)
    for start in range(0, length, chunk):
        positions = range(start, min(start + chunk, length))
        model.step(make_rows(ids[start : start + chunk], list(positions), [pages], logit_rows=[]))


def prepared(backend_name: str, kind: str = "q4_1", chunk: int = 64) -> TinyModel:
    """Return a model that holds my prompt and a neighbour's."""
    model = tiny_model(make_backend(backend_name), tiny_tensors(kind=kind))
    prefill(model, 1, MY_PAGES, CONTEXT, chunk)
    prefill(model, 2, OTHER_PAGES, 40)
    return model


def alone(model: TinyModel) -> bytes:
    """Return the probe row's logits in a forward of its own."""
    return model.step(make_rows([PROBE], [CONTEXT], [MY_PAGES])).logits[0].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_row_count_place_or_padding(backend_name: str, kind: str) -> None:
    model = prepared(backend_name, kind)
    expected = alone(model)
    random = np.random.default_rng(3)
    for count in range(1, 17):
        for place in range(count):
            ids = random.integers(0, model.arch.vocab_size, count)
            # Neighbours: another sequence's rows at any position, some of them padding.
            positions = random.integers(-1, 40, count)
            sequences = np.ones(count, np.int32)
            ids[place], positions[place], sequences[place] = PROBE, CONTEXT, 0
            rows = make_rows(
                ids, positions, [MY_PAGES, OTHER_PAGES], sequences=sequences, logit_rows=[place]
            )
            assert model.step(rows).logits[0].tobytes() == expected, (count, place)


@pytest.mark.parametrize("followers", range(16))
def test_logits_do_not_depend_on_drafts_that_follow(backend_name: str, followers: int) -> None:
    model = prepared(backend_name)
    expected = alone(model)
    count = followers + 1
    ids = [PROBE, *range(followers)]
    rows = make_rows(ids, range(CONTEXT, CONTEXT + count), [MY_PAGES])
    assert model.step(rows).logits[0].tobytes() == expected


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 32, 36])
def test_logits_and_kv_do_not_depend_on_prefill_chunks(backend_name: str, chunk: int) -> None:
    whole, chunked = prepared(backend_name), prepared(backend_name, chunk=chunk)
    assert alone(chunked) == alone(whole)
    for layer in range(whole.arch.num_layers):
        for page in MY_PAGES:
            for a, b in zip(whole.kv.read(layer, page), chunked.kv.read(layer, page), strict=True):
                assert a.tobytes() == b.tobytes()


def test_each_row_of_a_verify_equals_its_own_classic_step(backend_name: str) -> None:
    ids = [PROBE, 3, 60, 8, 96, 0, 12, 45, 77]
    positions = list(range(CONTEXT, CONTEXT + len(ids)))
    together = prepared(backend_name).step(make_rows(ids, positions, [MY_PAGES])).logits.copy()
    serial = prepared(backend_name)
    for i, (token, position) in enumerate(zip(ids, positions, strict=True)):
        logits = serial.step(make_rows([token], [position], [MY_PAGES])).logits
        assert logits[0].tobytes() == together[i].tobytes()


def test_logits_do_not_depend_on_which_pages_hold_the_context(backend_name: str) -> None:
    expected = alone(prepared(backend_name))
    model = tiny_model(make_backend(backend_name), tiny_tensors())
    pages = [30, 0, 21, 13]
    prefill(model, 1, pages, CONTEXT)
    step = model.step(make_rows([PROBE], [CONTEXT], [pages]))
    assert step.logits[0].tobytes() == expected


def test_stale_kv_beyond_a_row_is_never_read(backend_name: str) -> None:
    model = prepared(backend_name)
    expected = alone(model)
    for noise in range(3):  # rejected drafts leave their KV behind
        model.step(make_rows([noise] * 8, range(CONTEXT + 1, CONTEXT + 9), [MY_PAGES]))
        assert alone(model) == expected


def test_padding_rows_write_no_kv(backend_name: str) -> None:
    model = prepared(backend_name)
    before = [
        np.concatenate(model.kv.read(layer, page)).tobytes()
        for layer in range(model.arch.num_layers)
        for page in range(model.kv.num_pages)
    ]
    model.step(make_rows([5] * 8, [-1] * 8, [MY_PAGES], logit_rows=[]))
    after = [
        np.concatenate(model.kv.read(layer, page)).tobytes()
        for layer in range(model.arch.num_layers)
        for page in range(model.kv.num_pages)
    ]
    assert before == after


def test_wanted_logits_are_the_rows_asked_for_and_equal_logits_take_the_lowest_id(
    backend_name: str,
) -> None:
    model = prepared(backend_name)
    ids, positions = [PROBE, 3, 60, 8], list(range(CONTEXT, CONTEXT + 4))
    every = model.step(make_rows(ids, positions, [MY_PAGES])).logits.copy()
    some = model.step(make_rows(ids, positions, [MY_PAGES], logit_rows=[1, 3]))
    assert some.logits.tobytes() == every[[1, 3]].tobytes()
    assert some.argmax.tolist() == every[[1, 3]].argmax(axis=1).tolist()


LONG_PAGES = [list(range(s, 40, 2)) for s in (0, 1)]  # twenty pages each, interleaved


@pytest.mark.parametrize("context", [63, 64, 65, 255, 300])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_contexts_do_not_depend_on_rows_neighbours_or_threads(
    context: int, threads: int
) -> None:
    # Few rows take attention split by split side by side, many take it row tile by row tile.
    expected = None
    for size in (threads, 1):
        model = tiny_model(make_backend("cpu-auto", threads=size), tiny_tensors(), num_pages=40)
        prefill(model, 1, LONG_PAGES[0], context)
        prefill(model, 2, LONG_PAGES[1], 310)
        for count in (1, 2, 3, 5, 8, 11, 16, 40):
            for place in {0, count // 2, count - 1}:
                ids = np.arange(count) % 90
                positions = np.full(count, 309)
                positions[: place + 1] = -1
                sequences = np.ones(count, np.int32)
                ids[place], positions[place], sequences[place] = PROBE, context, 0
                rows = make_rows(
                    ids, positions, LONG_PAGES, sequences=sequences, logit_rows=[place]
                )
                logits = model.step(rows).logits[0].tobytes()
                expected = expected or logits
                assert logits == expected, (size, count, place)


def test_each_row_of_a_long_verify_equals_its_own_classic_step(backend_name: str) -> None:
    # Sixteen rows across a split's edge: some rows see one position of the last split, some none.
    ids, context = list(range(30, 46)), 185
    together = tiny_model(make_backend(backend_name), tiny_tensors(), num_pages=40)
    serial = tiny_model(make_backend(backend_name), tiny_tensors(), num_pages=40)
    prefill(together, 1, LONG_PAGES[0], context)
    prefill(serial, 1, LONG_PAGES[0], context, chunk=13)
    positions = list(range(context, context + len(ids)))
    logits = together.step(make_rows(ids, positions, [LONG_PAGES[0]])).logits.copy()
    for i, (token, position) in enumerate(zip(ids, positions, strict=True)):
        one = serial.step(make_rows([token], [position], [LONG_PAGES[0]])).logits
        assert one[0].tobytes() == logits[i].tobytes(), i
