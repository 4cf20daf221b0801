"""SmolLM2-135M on the GPU: close to the float32 reference, and exact against itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream.config import EngineConfig
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.load import load
from slipstream.engine.target import Target, build_target
from slipstream.errors import LoadError
from slipstream.kernels.ops import F32
from slipstream.models.loading import open_model, resolve_model
from slipstream.types import SamplingParams
from tests.tiny import make_backend, make_rows

pytestmark = [pytest.mark.gpu, pytest.mark.real_model]

TEXT = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "ordinary_text.txt"
POSITIONS = 128  # as many as an engine for eight sequences has logit rows
COUNT = 200


@pytest.fixture(scope="module")
def model() -> str:
    try:
        return str(resolve_model("smollm2-135m"))
    except LoadError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    make_backend("cuda")
    with load(model, EngineConfig(device="cuda", max_model_len=1024, profile="off")) as engine:
        yield engine


def log_probabilities(target: Target, ids: list[int]) -> F32:
    """Return float64 log-probabilities after every token, of shape (R, V)."""
    pages = [list(range(-(-len(ids) // 16)))]
    logits = target.step(make_rows(ids, range(len(ids)), pages)).logits.astype(np.float64)
    target.kv.zero(pages[0])
    shifted = logits - logits.max(axis=1, keepdims=True)
    out: F32 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return out


def test_distributions_are_close_to_the_float32_reference(model: str, engine: Engine) -> None:
    # Kullback-Leibler divergence, its mean and worst over the positions of ordinary text.
    ids = engine.tokenizer.encode(TEXT.read_text(encoding="utf-8"), parse_special=False)[:POSITIONS]
    file = open_model(model)
    reference = build_target(
        file.arch,
        make_backend("reference", kv_dtype="f32"),
        file.load_weights,
        EngineConfig(max_model_len=256, max_num_seqs=16),
    )
    exact = log_probabilities(reference, ids)
    fast = log_probabilities(engine.target, ids)
    divergence = (np.exp(exact) * (exact - fast)).sum(axis=1)
    print(f"KL mean {divergence.mean():.2e}, worst {divergence.max():.2e}")
    assert divergence.mean() < 1e-3
    assert divergence.max() < 2e-2
    assert (exact.argmax(axis=1) == fast.argmax(axis=1)).mean() > 0.97


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kernel", ["auto", "gemv", "tile"])
def test_drafts_and_kernels_never_change_a_token(
    model: str, engine: Engine, kernel: str, temperature: float
) -> None:
    params = SamplingParams(max_tokens=COUNT, temperature=temperature, seed=7, top_p=0.95)
    prompts = [
        [{"role": "user", "content": text}]
        for text in ("Repeat: one two three one two three", "Why is the sky blue?")
    ]

    def ids(k: int | str, **settings: object) -> list[list[int]]:
        config = EngineConfig(k=k, max_model_len=1024, profile="off", **settings)  # type: ignore[arg-type]
        target = engine.target
        if settings:
            file = open_model(model)
            backend = make_backend("cuda", kernel=kernel)
            target = build_target(file.arch, backend, file.load_weights, config)
        own = Engine(
            target,
            engine.tokenizer,
            template=engine._template,
            config=config,
            make_drafters=[NGramDrafter],
        )
        return [reply.token_ids for reply in own.generate(prompts, params)]

    expected = ids("off")
    for k in (1, 4, 15):
        assert ids(k, verify_kernel=kernel, max_num_seqs=4) == expected
