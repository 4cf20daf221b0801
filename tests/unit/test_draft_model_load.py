"""A draft model by name or path: found, compared with the target, planned for, reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config import EngineConfig
from slipstream.drafters.draft_model import DraftModel
from slipstream.engine.draft_model import DraftSource
from slipstream.engine.load import choose_backend, choose_paid, load
from slipstream.engine.memory import plan_memory
from slipstream.engine.target import build_target
from slipstream.errors import CapacityError, LoadError, MismatchError
from slipstream.models.loading import open_model
from slipstream.types import SamplingParams
from tests.gguf_files import F32, SPECIAL, gguf_bytes, toy_entries, toy_metadata, toy_tokens
from tests.tiny import ARCH, tiny_arch
from tests.unit.test_memory_plan import MIB, Device

# Heads of 16, which every back end takes.
HEADS = {
    "llama__attention__head_count": 2,
    "llama__attention__head_count_kv": 1,
    "llama__rope__dimension_count": 16,
}
ASKED = SamplingParams(max_tokens=12, ignore_eos=True)


def toy_model(folder: Path, name: str, seed: int, **changes: Any) -> Path:
    """Write a small model with random weights."""
    random = np.random.default_rng(seed)
    entries = []
    for entry in toy_entries(F32):
        values = random.standard_normal(entry.dims[::-1], dtype=np.float32)
        values = np.abs(values) if "norm" in entry.name else values / 3
        entries.append(replace(entry, data=values.tobytes()))
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.gguf"
    metadata = toy_metadata(general__name=name, **(HEADS | changes))
    path.write_bytes(gguf_bytes(metadata, entries))
    return path


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Return a target and a draft model."""
    return toy_model(tmp_path, "large", 1), toy_model(tmp_path, "small", 2)


@pytest.mark.parametrize("drafter", ["{}", "ngram+{}"])
def test_a_model_s_path_names_a_draft_model(models: tuple[Path, Path], drafter: str) -> None:
    target, draft = models
    plain = load(target, drafter="none", profile="off").generate(["hello"], ASKED)[0]
    engine = load(target, drafter=drafter.format(draft), k=3, profile="off")
    (reply,) = engine.generate(["hello"], ASKED)
    assert reply.token_ids == plain.token_ids
    names = drafter.format("draft_model")
    assert engine.pairing.drafter_state() == (names, None)
    assert reply.speculation.drafter == names
    assert reply.speculation.sources["draft_model"]["drafted"] > 0
    assert engine.target.head_bytes > 0
    alone = load(target, drafter="none", profile="off").target
    assert engine.target.weight_bytes == alone.weight_bytes == alone.backend.weight_bytes()
    assert engine.target.draft_kv_token_bytes == engine.target.kv_token_bytes


def test_a_target_may_draft_for_itself(models: tuple[Path, Path]) -> None:
    target, _ = models
    engine = load(target, drafter=str(target), k=4, profile="off")
    (reply,) = engine.generate(["hello"], ASKED)
    assert reply.speculation.accepted == reply.speculation.drafted > 6


def test_what_was_timed_of_it_is_known_before_the_first_request(
    models: tuple[Path, Path],
) -> None:
    target, draft = models
    engine = load(target, drafter=str(draft), profile="off")
    assert engine.policy is not None
    state = engine.policy.cost.drafting.state()
    assert [k for num, k, *_ in state["draft"] if num == 1] == list(range(1, 16))
    assert len(state["reading"]) == 1
    head = engine.target.head
    assert isinstance(head, DraftModel)
    assert head.pages.num_free == engine.target.kv.num_pages  # timing gave all back
    assert not head.declined


def test_profiles_tell_draft_models_apart(models: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = models
    other = toy_model(tmp_path, "other", 3)
    config = EngineConfig(drafter=str(draft))
    keys = {
        choose_paid(
            replace(config, drafter=f"{path}"), open_model(target), choose_backend(config)
        ).key
        for path in (draft, other)
    }
    assert len(keys) == 2


def test_a_model_of_other_tokens_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = models
    tokens = toy_tokens()
    tokens[5], tokens[9] = tokens[9], tokens[5]
    wrong = toy_model(tmp_path, "wrong", 2, tokenizer__ggml__tokens=tokens)
    with pytest.raises(MismatchError, match=f"has {len(tokens)} tokens, .* {len(tokens)}, and tok"):
        load(target, drafter=str(wrong))


def test_a_model_padded_to_another_size_is_taken(tmp_path: Path) -> None:
    # Embeddings are often padded to a multiple that kernels like.
    target = toy_model(tmp_path, "large", 1)
    tokens = [*toy_tokens(), *(f"[PAD{i}]" for i in range(10))]
    types = [3] * len(SPECIAL) + [1] * (len(toy_tokens()) - len(SPECIAL)) + [5] * 10
    random = np.random.default_rng(4)
    entries = []
    for entry in toy_entries(F32):
        dims = (32, len(tokens)) if entry.name == "token_embd.weight" else entry.dims
        values = np.abs(random.standard_normal(dims[::-1], dtype=np.float32)) / 3
        entries.append(replace(entry, dims=dims, data=values.tobytes()))
    padded = tmp_path / "padded.gguf"
    changes = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": types}
    padded.write_bytes(gguf_bytes(toy_metadata(**(HEADS | changes)), entries))
    for one, other in ((target, padded), (padded, target)):
        plain = load(one, drafter="none", profile="off").generate(["hello"], ASKED)[0]
        (reply,) = load(one, drafter=str(other), k=3, profile="off").generate(["hello"], ASKED)
        assert reply.token_ids == plain.token_ids


def test_a_model_that_is_not_there_is_named(models: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = models
    with pytest.raises(LoadError, match="no such file"):
        load(target, drafter=str(tmp_path / "absent.gguf"))
    with pytest.raises(LoadError, match="must be a known name"):
        load(target, drafter="nothing-9b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match=r"config\.json is missing"):
        load(target, drafter=str(tmp_path / "empty"))


def planned(weights: int, **settings: Any) -> Any:
    return plan_memory(
        Device(),
        ARCH,
        EngineConfig(**{"memory_fraction": 1.0, "max_num_seqs": 2, **settings}),
        weights_bytes=weights * MIB,
        drafter_bytes=15 * MIB,
        draft_page_bytes=MIB // 2,
        max_model_len=ARCH.context_len,
        max_rows=64,
    )


def test_its_pages_are_in_the_plan() -> None:
    plan = planned(10, max_num_seqs=64)
    assert plan.num_pages == (100 - 10 - 15 - 10) * 2 // 3
    assert plan.kv_bytes == plan.num_pages * (MIB + MIB // 2)


def test_what_does_not_fit_is_refused_with_the_sum() -> None:
    with pytest.raises(CapacityError) as caught:
        planned(50)
    assert caught.value.message == (
        "the model does not fit memory_fraction 1.0: weights 0.05 + drafter 0.01 + work space "
        "0.01 + KV of 512 tokens 0.05 = 0.12 of 0.10 GiB"
    )


class _Backend:
    """As much of a back end with a device as the building of a target touches."""

    name = "fake"
    reason = "tests"

    def __init__(self) -> None:
        self.memory = Device()
        self.held = 0
        self.taken: list[tuple[int, int]] = []
        self.rows: list[int] = []

    def weight_bytes(self) -> int:
        return self.held

    def kv_cache(self, arch: Any, num_pages: int, max_len: int) -> Any:
        self.taken.append((num_pages, max_len))
        return type("KV", (), {"num_pages": num_pages})()

    def compile(self, forward: Any, *, max_rows: int, max_logits: int) -> Any:
        self.rows.append(max_rows)
        return None


def test_a_draft_model_is_built_within_its_target_s_plan() -> None:
    backend: Any = _Backend()

    def take(size: int) -> Any:
        def weights(_: Any) -> Any:
            backend.held += size * MIB
            return object()

        return weights

    config = EngineConfig(memory_fraction=1.0, max_num_seqs=4, max_model_len=400)
    draft = DraftSource(arch=tiny_arch(context_len=256), load_weights=take(5))
    target = build_target(ARCH, backend, take(20), config, draft=draft)
    assert target.plan is not None
    assert target.head_bytes == 5 * MIB
    assert target.plan.weights_bytes == 20 * MIB
    assert target.plan.drafter_bytes == (5 + 10) * MIB  # its weights and work space
    assert target.plan.draft_page_bytes == MIB
    num_pages = target.plan.num_pages
    assert num_pages == (100 - 20 - 15 - 10) // 2
    assert backend.taken == [(num_pages, 400), (num_pages, 256)]
    assert backend.rows[1] == config.prefill_chunk + 2 * 4
    asked = backend.memory.asked[0]
    assert (asked["max_rows"], asked["max_logits"], asked["max_len"]) == (264, 4, 256)
