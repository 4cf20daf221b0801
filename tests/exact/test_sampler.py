"""A pick is a function of row, history, seed, choice and position, the same on every path."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from slipstream.engine.matcher import Matcher
from slipstream.engine.sampling import (
    PickKernel,
    Sampler,
    native_kernel,
    reference_kernel,
)
from slipstream.errors import SlipstreamError
from slipstream.kernels.noise import NoiseKey, gumbel, noise_bits
from slipstream.kernels.ops import F32
from slipstream.types import SamplingParams
from tests.tiny import make_backend

ISA_PATHS = ("avx512", "portable")
NO_IDS, NO_VALUES = np.zeros(0, np.int32), np.zeros(0, np.float32)


@pytest.fixture(params=ISA_PATHS)
def isa(request: pytest.FixtureRequest) -> str:
    make_backend(f"cpu-{request.param}", threads=1)  # skips where the path is not available
    return str(request.param)


@pytest.fixture
def kernel(isa: str) -> PickKernel:
    return native_kernel(isa)


def rows_of(size: int, seed: int) -> dict[str, F32]:
    """Return rows of all shapes: peaked, flat, equal, with ties, with holes."""
    draw = np.random.default_rng(seed)
    peaked = -1.5 * np.log(draw.permutation(size) + 1.0) + draw.normal(0, 0.3, size)
    coarse = np.round(draw.normal(0, 2, size))
    holes = draw.normal(0, 3, size)
    holes[draw.random(size) < 0.5] = -np.inf
    holes[draw.integers(size)] = 1.0
    broken = draw.normal(0, 3, size)
    broken[draw.random(size) < 0.2] = np.nan
    broken[draw.integers(size)] = 2.0
    lonely = np.full(size, -np.inf)
    lonely[draw.integers(size, size=2)] = [1.0, 2.0]
    rows = {
        "lonely": lonely,
        "sorted": np.sort(draw.normal(0, 3, size)),
        "peaked": peaked + 10,
        "wide": draw.normal(0, 5, size),
        "flat": draw.normal(0, 0.01, size),
        "equal": np.full(size, 0.25),
        "ties": coarse,
        "huge": draw.normal(0, 1e30, size),
        "tiny": draw.normal(0, 1e-30, size),
        "holes": holes,
        "broken": broken,
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


def filters_of(draw: random.Random, size: int) -> dict[str, Any]:
    return {
        "temperature": draw.choice([0.0, 1e-40, 0.2, 0.7, 1.0, 1.5, 100.0]),
        "top_k": draw.choice([0, 0, 1, 3, 40, size - 1, size, size + 1]),
        "top_p": draw.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 0.9999999999999999]),
        "min_p": draw.choice([0.0, 0.0, 1e-12, 0.01, 0.1, 1.0]),
    }


@pytest.mark.parametrize("size", [1, 2, 5, 16, 31, 32, 33, 1000, 4097])
def test_kernel_equals_the_definition(kernel: PickKernel, size: int) -> None:
    draw = random.Random(size)
    reference = reference_kernel()
    for trial in range(12 if size < 1000 else 4):
        for name, row in rows_of(size, trial).items():
            for _ in range(8):
                filters = filters_of(draw, size)
                key = NoiseKey(
                    seed=draw.getrandbits(64),
                    choice=draw.randrange(64),
                    position=draw.getrandbits(32),
                )
                num = draw.choice([0, 0, 1, size])
                ids = np.array([draw.randrange(size) for _ in range(num)], np.int32)
                values = row[::-1][ids].copy()
                allowed = None
                if draw.random() < 0.3:
                    allowed = np.array([draw.random() < 0.5 for _ in range(size)])
                ours = kernel.pick(row, ids, values, allowed, **filters, key=key)
                theirs = reference.pick(row, ids, values, allowed, **filters, key=key)
                assert ours == theirs, (name, filters, key, num)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_kernel_equals_the_definition_at_full_size(kernel: PickKernel, top_p: float) -> None:
    filters = {"temperature": 1.0, "top_k": 0, "top_p": top_p, "min_p": 0.0}
    for name, row in rows_of(49_152, 7).items():
        for seed in range(3):
            key = NoiseKey(seed=seed, choice=0, position=seed)
            ours = kernel.pick(row, NO_IDS, NO_VALUES, None, **filters, key=key)
            theirs = reference_kernel().pick(row, NO_IDS, NO_VALUES, None, **filters, key=key)
            assert ours == theirs, (name, seed)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_summary_equals_the_definition(kernel: PickKernel, num_top: int) -> None:
    for size in (1, 5, 33, 5000):
        for row in rows_of(size, 3).values():
            ours, theirs = (k.summarize(row, num_top) for k in (kernel, reference_kernel()))
            assert ours is not None
            assert theirs is not None
            assert ours[:2] == theirs[:2]
            assert ours[2].tolist() == theirs[2].tolist()


def test_noise_equals_the_definition(isa: str) -> None:
    from slipstream.kernels.cpu import _native

    key = NoiseKey(seed=2**64 - 3, choice=5, position=2**32 - 1)
    for domain in (0, 7):
        bits, values = _native.noise(isa, key.seed, key.choice, key.position, domain, 10_001)
        expected = noise_bits(key, 10_001, domain=domain)
        assert bits.tobytes() == expected.tobytes()
        assert values.tobytes() == gumbel(expected).tobytes()


def samplers(kernel: PickKernel) -> list[Sampler]:
    """Return requests of many kinds, seeded apart."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5),
        SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.1),
        SamplingParams(temperature=1.0, min_p=0.05, logit_bias={3: 2.0}),
    ]
    return [
        Sampler(p, vocab_size=500, seed=100 + i, choice=i % 2, kernel=kernel)
        for i, p in enumerate(params)
    ]


def test_order_of_calls_and_batch_mates_never_matter(kernel: PickKernel) -> None:
    """vllm 6038, 10863: per-request seeds were ignored, mixed batches corrupted."""
    rows = np.random.default_rng(2).normal(0, 2, (40, 500)).astype(np.float32)
    calls = [(s, i) for s in samplers(kernel) for i in range(len(rows))]

    def run(call: tuple[Sampler, int]) -> int:
        sampler, i = call
        # A copy at another address and in another batch place is the same row.
        return sampler.pick(rows[i].copy(), sampler.history([1, 2, 3]), 10 + i)

    expected = {call: run(call) for call in calls}
    for seed in range(3):
        shuffled = calls.copy()
        random.Random(seed).shuffle(shuffled)
        assert {call: run(call) for call in shuffled} == expected
    with ThreadPoolExecutor(4) as pool:
        assert dict(zip(calls, pool.map(run, calls), strict=True)) == expected


def test_seed_choice_and_position_each_change_the_tokens(kernel: PickKernel) -> None:
    row = np.random.default_rng(3).normal(0, 0.5, 1000).astype(np.float32)
    params = SamplingParams(temperature=1.0)

    def tokens(seed: int, choice: int, start: int) -> list[int]:
        sampler = Sampler(params, vocab_size=1000, seed=seed, choice=choice, kernel=kernel)
        history = sampler.history([1])
        return [sampler.pick(row, history, start + i) for i in range(20)]

    base = tokens(1, 0, 5)
    assert tokens(1, 0, 5) == base
    assert tokens(1, 0, 6)[:-1] == base[1:]
    for other in (tokens(2, 0, 5), tokens(1, 1, 5), tokens(1 + 2**40, 0, 5), tokens(1, 0, 900)):
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 4


def test_numpy_numbers_as_parameters_change_nothing(kernel: PickKernel) -> None:
    row = np.random.default_rng(6).normal(0, 2, 300).astype(np.float32)
    plain: dict[str, Any] = {"temperature": 0.75, "top_p": 0.3, "top_k": 9, "min_p": 0.125}
    odd = {name: np.float32(v) for name, v in plain.items()} | {"top_k": np.int32(9)}
    plain["top_p"] = float(odd["top_p"])
    tokens = []
    for fields in (plain, odd):
        for k in (kernel, reference_kernel()):
            sampler = Sampler(SamplingParams(**fields), vocab_size=300, seed=np.int64(5), kernel=k)
            history = sampler.history([1])
            tokens.append([sampler.pick(row, history, position) for position in range(50)])
    assert tokens == [tokens[0]] * 4


def test_greedy_takes_the_lowest_id_among_equals(kernel: PickKernel) -> None:
    row = np.zeros(100, np.float32)
    row[[40, 70, 71]] = 3
    for k in (kernel, reference_kernel()):
        sampler = Sampler(SamplingParams(), vocab_size=100, seed=0, kernel=k)
        assert sampler.is_argmax
        assert sampler.pick(row, sampler.history([0]), 1) == 40


def test_logprobs_are_raw_sorted_and_ranked(kernel: PickKernel) -> None:
    row = np.random.default_rng(4).normal(0, 3, 3000).astype(np.float32)
    row[[10, 2000]] = 20  # a tie at the top
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    sampler = Sampler(
        SamplingParams(temperature=0.1, logprobs=5), vocab_size=3000, seed=0, kernel=kernel
    )
    order = np.argsort(-row, kind="stable")
    for rank in (1, 2, 3, 500, 3000):
        got = sampler.logprobs(row, int(order[rank - 1]))
        assert got.rank == rank
        assert got.logprob == pytest.approx(exact[order[rank - 1]], abs=2e-6)
        assert [token_id for token_id, _ in got.top] == order[:5].tolist()
        assert [value for _, value in got.top] == pytest.approx(exact[order[:5]], abs=2e-6)
    assert got == Sampler(
        SamplingParams(logprobs=5), vocab_size=3000, seed=9, kernel=reference_kernel()
    ).logprobs(row, int(order[2999]))


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_is_an_error(
    kernel: PickKernel, value: float, temperature: float
) -> None:
    row = np.full(50, value, np.float32)
    for k in (kernel, reference_kernel()):
        sampler = Sampler(SamplingParams(temperature=temperature), vocab_size=50, seed=0, kernel=k)
        with pytest.raises(SlipstreamError, match="at position 3"):
            sampler.pick(row, sampler.history([0]), 3)
        with pytest.raises(SlipstreamError):
            sampler.logprobs(row, 0)


def test_a_mask_that_forbids_all_is_an_error_and_one_that_leaves_a_token_takes_it(
    kernel: PickKernel,
) -> None:
    row = np.random.default_rng(5).normal(size=64).astype(np.float32)
    sampler = Sampler(
        SamplingParams(temperature=1.0, top_p=0.5), vocab_size=64, seed=0, kernel=kernel
    )
    allowed = np.zeros(64, np.bool_)
    history = sampler.history([0], cast("Matcher", SimpleNamespace(allowed=lambda: allowed)))
    with pytest.raises(SlipstreamError):
        sampler.pick(row, history, 1)
    allowed[63] = True
    assert sampler.pick(row, history, 1) == 63


def test_bad_arguments_are_refused(isa: str) -> None:
    from slipstream.kernels.cpu import _native

    row = np.zeros(8, np.float32)
    rest = (None, 1.0, 0, 1.0, 0.0, 0, 0, 0)
    for ids, values in (([8], [0.0]), ([-1], [0.0]), ([1, 2], [0.0])):
        arrays = np.array(ids, np.int32), np.array(values, np.float32)
        with pytest.raises(ValueError, match=r"override|length"):
            _native.pick(isa, row, *arrays, *rest)
    with pytest.raises(ValueError, match="mask"):
        _native.pick(isa, row, NO_IDS, NO_VALUES, np.zeros(7, np.bool_), *rest[1:])
    with pytest.raises(ValueError, match="isa"):
        _native.pick("mmx", row, NO_IDS, NO_VALUES, *rest)
