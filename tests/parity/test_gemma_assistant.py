"""Gemma 4's assistant against transformers' own module and candidate generator."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the assistant is compared with transformers' own")

import torch
from safetensors.numpy import load_file, save_file
from transformers.generation.candidate_generator import (
    SinglePositionMultiTokenCandidateGenerator,
)

import slipstream.kernels.reference as reference_module
from slipstream.errors import LoadError, MismatchError
from slipstream.kernels.reference import ReferenceBackend
from slipstream.kernels.rowwise.draft import ReferenceDraftOps
from slipstream.models.loading.folder import read_folder
from slipstream.models.loading.gemma_assistant import GemmaAssistant, read_gemma_assistant
from slipstream.models.loading.weights_map import load_decoder
from tests.drafting import DraftingModel, compile_pair, draft_rows
from tests.gemma4_pair import VOCAB, WINDOW, make_pair
from tests.tiny import BACKENDS, make_backend

K = 5
# Within the window, at its edges, beyond it, and over several pages.
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 50)
PAIRS = [
    {"shared": 0, "clustered": False},
    {"shared": 2, "clustered": False, "seed": 1},
    {"shared": 0, "clustered": True, "seed": 2},
]


@dataclasses.dataclass
class Pair:
    """Transformers' pair, and where it is saved."""

    target: Any
    assistant: Any
    folder: Path

    def read(self) -> GemmaAssistant:
        arch = read_folder(self.folder / "target").checkpoint.arch
        return read_gemma_assistant(self.folder / "assistant", arch)

    def ours(self, backend: Any) -> DraftingModel:
        checkpoint = read_folder(self.folder / "target").checkpoint
        weights = load_decoder(checkpoint, backend)
        return compile_pair(backend, checkpoint.arch, weights, self.read())

    def theirs(self, prompt: list[int], anchor: int) -> tuple[list[int], Any]:
        """Return what transformers drafts after a prompt and an anchor, and the logits (K, V)."""
        config = self.assistant.generation_config
        config.num_assistant_tokens = K
        config.max_length = 256
        generator = SinglePositionMultiTokenCandidateGenerator(
            self.assistant, self.target.get_input_embeddings(), config
        )
        with torch.no_grad():
            outputs = self.target(
                torch.tensor([prompt]), output_hidden_states=True, return_shared_kv_states=True
            )
            ids = torch.tensor([[*prompt, anchor]])
            drafted, logits = generator.get_candidates(
                ids, {}, outputs, is_first_iteration=False, n_last_matches=0
            )
        assert logits is not None
        return drafted[0, len(prompt) + 1 :].tolist(), logits[0]


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return Pair(*make_pair(folder, **request.param), folder)


@pytest.fixture
def seen_logits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the logits, (B, V), of each draft step on the reference back end."""
    seen: list[Any] = []

    class Watched(ReferenceDraftOps):
        def pick(self, x: Any, weight: Any, token_ids: Any, *others: Any) -> None:
            seen.append(self.linear(x, weight)[:, np.argsort(token_ids)])
            super().pick(x, weight, token_ids, *others)

    monkeypatch.setattr(reference_module, "ReferenceDraftOps", Watched)
    return seen


def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(3, VOCAB, length).tolist() for length in LENGTHS]


ANCHORS = [7, 19, 23, 64, 90, 101]


def drafted(model: DraftingModel, **options: Any) -> list[list[int]]:
    """Draft K tokens after every prompt."""
    table, ends = model.read(prompts())
    rows = draft_rows(ANCHORS, list(LENGTHS), table, ends, K, **options)
    return model.draft(rows).tolist()  # type: ignore[no-any-return]


def test_drafts_and_logits_are_those_of_transformers(pair: Pair, seen_logits: list[Any]) -> None:
    ours = drafted(pair.ours(ReferenceBackend(kv_dtype="f32")))
    for row, (prompt, anchor) in enumerate(zip(prompts(), ANCHORS, strict=True)):
        tokens, logits = pair.theirs(prompt, anchor)
        assert ours[row] == tokens
        for step in range(K):
            looked_into = logits[step] > logits[step].min()
            got = seen_logits[step][row]
            assert looked_into.sum() > 20
            assert torch.allclose(got[looked_into], logits[step][looked_into], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_cpu_drafts_what_the_reference_drafts(
    pair: Pair, backend: str, temperature: float
) -> None:
    seeds = tuple(range(len(ANCHORS)))
    options = {"temperature": temperature, "seeds": seeds}
    assert drafted(pair.ours(make_backend(backend)), **options) == drafted(
        pair.ours(ReferenceBackend()), **options
    )


def test_clusters_outside_of_the_best_are_never_picked(pair: Pair) -> None:
    found = pair.read()
    if found.clusters is None:
        assert "centroids" not in found.tensors
        return
    sizes = np.bincount(found.clusters.members)
    assert (sizes == VOCAB // 16).all()
    one = dataclasses.replace(found, clusters=dataclasses.replace(found.clusters, top=1))
    checkpoint = read_folder(pair.folder / "target").checkpoint
    backend = ReferenceBackend()
    model = compile_pair(backend, checkpoint.arch, load_decoder(checkpoint, backend), one)
    narrow = drafted(model)
    assert narrow != drafted(pair.ours(ReferenceBackend()))


def test_an_assistant_for_another_target_names_both_sizes(pair: Pair) -> None:
    arch = read_folder(pair.folder / "target").checkpoint.arch
    other = dataclasses.replace(arch, hidden_size=96)
    with pytest.raises(MismatchError, match=r"hidden_size 64, this one has 96"):
        read_gemma_assistant(pair.folder / "assistant", other)
    narrow = tuple(dataclasses.replace(a, window=a.window and a.window + 4) for a in arch.attention)
    with pytest.raises(MismatchError, match=r"window 12, the target's have 16"):
        read_gemma_assistant(pair.folder / "assistant", dataclasses.replace(arch, attention=narrow))


def test_a_layer_s_scale_is_one_number_or_missing(pair: Pair, tmp_path: Path) -> None:
    arch = read_folder(pair.folder / "target").checkpoint.arch
    folder = shutil.copytree(pair.folder / "assistant", tmp_path / "assistant")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.layer_scalar"
    for shape in ((0,), (2,), (1, 1)):
        save_file(stored | {name: np.ones(shape, np.float32)}, folder / "model.safetensors")
        with pytest.raises(LoadError, match=r"layers\.1\.layer_scalar must have shape \[1\]"):
            read_gemma_assistant(folder, arch)
    del stored[name]
    save_file(stored, folder / "model.safetensors")
    assert read_gemma_assistant(folder, arch).head.scales[1] == 1.0
