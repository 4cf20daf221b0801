"""Row invariance of all that a description has: rows, place, padding, chunks, threads, kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.models.arch import Arch
from tests.descriptions import ARCHS, described, described_model, random_description
from tests.tiny import BACKENDS, TinyModel, make_backend, make_rows

PAGES = [list(range(0, 40, 2)), list(range(1, 40, 2))]
CONTEXT = 117  # sixteen rows from here cross a split, and the beginnings of windows cross pages
NEIGHBOUR = 140
DRAWN = {f"seed {seed}": random_description(seed) for seed in range(8)}
CHOSEN = {name: ARCHS[name] for name in ("shared KV", "wide heads", "a window of one")}


def prompt(sequence: int, length: int, vocab_size: int) -> np.ndarray[Any, Any]:
    """Draw a prompt's ids, below 50."""
    return np.random.default_rng(sequence).integers(0, min(50, vocab_size), length)


def prefill(model: TinyModel, sequence: int, length: int, chunk: int) -> None:
    """Write the KV of a random prompt."""
    ids = prompt(sequence, length, model.arch.vocab_size)
    for start in range(0, length, chunk):
        positions = list(range(start, min(start + chunk, length)))
        rows = make_rows(ids[start : start + chunk], positions, [PAGES[sequence]], logit_rows=[])
        model.step(rows)


def prepared(name: str, arch: Arch, *, kind: str, chunk: int = 64, **options: Any) -> TinyModel:
    model = described_model(make_backend(name, **options), arch, kind=kind)
    prefill(model, 0, CONTEXT, chunk)
    prefill(model, 1, NEIGHBOUR, 64)
    return model


def serial(model: TinyModel, ids: list[int]) -> list[bytes]:
    """Take the tokens in classic steps and return each one's logits."""
    out = []
    for place, token in enumerate(ids):
        rows = make_rows([token], [CONTEXT + place], [PAGES[0]])
        out.append(model.step(rows).logits[0].tobytes())
    return out


def together(model: TinyModel, ids: list[int], others: int) -> list[bytes]:
    """Take the tokens in one step, rows of a neighbour before and behind, some of them padding."""
    random = np.random.default_rng(others)
    before, count = others // 2, len(ids)
    tokens = random.integers(0, model.arch.vocab_size, count + others)
    positions = random.integers(-1, NEIGHBOUR, count + others)
    sequences = np.ones(count + others, np.int32)
    mine = slice(before, before + count)
    tokens[mine], positions[mine] = ids, range(CONTEXT, CONTEXT + count)
    sequences[mine] = 0
    rows = make_rows(
        tokens, positions, PAGES, sequences=sequences, logit_rows=range(before, before + count)
    )
    return [row.tobytes() for row in model.step(rows).logits]


def pages_of(model: TinyModel) -> list[bytes]:
    """Return my context's pages of every layer."""
    used = PAGES[0][: CONTEXT // 16]
    layers = range(model.arch.num_layers)
    return [half.tobytes() for i in layers for page in used for half in model.kv.read(i, page)]


@pytest.mark.parametrize("kind", ["f32", "q4_1"])
@pytest.mark.parametrize("arch", CHOSEN | DRAWN)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
def test_rows_of_a_verify_equal_classic_steps_whatever_runs_beside_them(
    name: str, arch: str, kind: str
) -> None:
    own = (CHOSEN | DRAWN)[arch]
    ids = [3, 60, 8, 96, 0, 12, 45, 77, 21, 5, 4, 90, 33, 2, 1, 11]
    base = prepared(name, own, kind=kind, chunk=13, threads=1)
    expected, written = serial(base, ids), pages_of(base)
    assert len(set(expected)) == len(ids)
    for threads, chunk, kernel in [(1, 64, "auto"), (2, 64, "tile"), (3, 7, "gemv")]:
        options = {"threads": threads, "kernel": kernel}
        model = prepared(name, own, kind=kind, chunk=chunk, **options)
        assert pages_of(model) == written
        for count, others in [(16, 0), (1, 1), (2, 0), (5, 9), (9, 40), (16, 3)]:
            found = together(model, ids[:count], others)
            assert found == expected[:count], (threads, count, others)
        assert serial(model, ids) == expected


@pytest.mark.parametrize("arch", CHOSEN)
def test_the_reference_keeps_row_invariance_too(arch: str) -> None:
    ids = [3, 60, 8, 96, 0]
    expected = serial(prepared("reference", CHOSEN[arch], kind="f32", chunk=64), ids)
    model = prepared("reference", CHOSEN[arch], kind="f32", chunk=50)
    assert together(model, ids, 3) == expected


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_what_lies_outside_a_window_or_behind_a_row_never_arrives(
    name: str, softcap: float
) -> None:
    poison, arch = 50, described([{"window": 20, "softcap": softcap}, {"window": 33}])
    model = described_model(make_backend(name, threads=2), arch, poison=poison)
    prefill(model, 0, CONTEXT, 64)
    assert poison not in prompt(0, CONTEXT, arch.vocab_size)
    ids = [7, 8, 9]
    clean = [serial(model, ids), together(model, ids, 0), together(model, ids, 40)]
    # KV of NaN before all windows and behind the last row.
    for first, end in [(0, 40), (40, CONTEXT + 1 - 33), (CONTEXT + 3, CONTEXT + 43)]:
        positions = range(first, end)
        model.step(make_rows([poison] * len(positions), positions, [PAGES[0]], logit_rows=[]))
    assert np.isnan(model.kv.read(0, PAGES[0][0])[0]).all()
    for expected, take in zip(
        clean, [lambda: together(model, ids, 0), lambda: serial(model, ids)], strict=False
    ):
        assert take() == expected
    assert together(model, ids, 40) == clean[0]
