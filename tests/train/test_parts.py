"""Rounds, vocabulary, layers, recipe, optimiser: the small parts of a distillation."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from slipstream.errors import ConfigError  # noqa: E402
from slipstream.train.acceptance import Rounds, chunks, reply_spans, walk_rounds  # noqa: E402
from slipstream.train.code_requests import ABOUT_CODE, about_code, code_request  # noqa: E402
from slipstream.train.corpus import Shard  # noqa: E402
from slipstream.train.layers import (  # noqa: E402
    choose_feature_layers,
    choose_kv_layers,
    copying_scores,
)
from slipstream.train.openings import document_request, excerpt, request  # noqa: E402
from slipstream.train.optimizer import Optimizer, orthogonal, pace  # noqa: E402
from slipstream.train.recipe import Recipe  # noqa: E402
from slipstream.train.replay import Replay  # noqa: E402
from slipstream.train.vocabulary import choose_vocabulary, count_tokens  # noqa: E402
from tests.tiny import ARCH  # noqa: E402
from tests.train.worlds import tiny_target  # noqa: E402


def test_rounds_walk_from_anchor_to_anchor() -> None:
    # Anchors at positions 1, 2, ...: the reply is at positions 3 to 9.
    accepted = [9, 9, 2, 9, 9, 0, 1, 9, 9]
    # 3 accepts 2 and its bonus is 6; 6 accepts none; 7 accepts 1; 9 is the last token.
    assert walk_rounds(accepted, 3, 9, 4) == Rounds(accepted=(1, 1, 1, 0, 0))
    # At k = 1, 3 accepts 1 of its 2: anchors 3, 5, 7, 9.
    assert walk_rounds(accepted, 3, 9, 1) == Rounds(accepted=(0, 3))


def test_a_round_drafts_no_further_than_the_reply_goes() -> None:
    assert walk_rounds([4] * 9, 1, 3, 4) == Rounds(accepted=(0, 1, 0, 0, 0))
    assert walk_rounds([4] * 9, 1, 1, 4) == Rounds(accepted=(0,) * 5)


def test_what_rounds_say() -> None:
    rounds = Rounds(accepted=(2, 1, 1))
    assert rounds.acceptance_length == 1 + 3 / 4
    assert rounds.by_position == [2 / 4, 1 / 2]
    assert Rounds(accepted=(0, 0)).acceptance_length is None
    assert (rounds + rounds).accepted == (4, 2, 2)


def test_replies_are_found_in_their_mask() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]]).bool()
    assert reply_spans(mask) == [[(1, 2), (5, 5)], []]


def test_chunks_have_one_size_and_cover_every_row_once() -> None:
    rows = list(chunks(torch.zeros(100, 1000)))
    assert {len(part) for part in rows} == {32}
    assert [row for part in rows for row in dict.fromkeys(part)] == list(range(100))
    assert list(chunks(torch.zeros(0, 10))) == []


def test_vocabulary_is_the_commonest_and_what_must_be_in_it() -> None:
    shard = Shard(
        ids=torch.tensor([[5, 5, 6, 7], [7, 8, 9, 9]], dtype=torch.int32),
        replies=torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0]]).bool(),
        temperatures=torch.zeros(2),
    )
    in_replies, elsewhere = count_tokens([shard], 12)
    assert in_replies.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0]
    ids, coverage = choose_vocabulary(in_replies, elsewhere, 3, always=[2])
    assert ids.tolist() == [2, 5, 7]
    assert coverage == 3 / 4


def test_copying_scores_are_shares_and_the_best_layers_are_taken() -> None:
    scores = copying_scores(tiny_target())
    assert len(scores) == ARCH.num_layers
    assert all(0 <= score <= 1 for score in scores)
    assert choose_kv_layers([0.0] * 17 + [0.8] + [0.5] * 12) == (17, 20, 24, 28)
    assert choose_kv_layers([0.1, 0.8, 0.2, 0.3]) == (1, 2)
    assert choose_kv_layers([0.1, 0.8]) == (1,)
    assert choose_feature_layers(30) == (10, 20, 30)
    assert choose_feature_layers(1) == (1,)


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 48, 16), (2, 16, 48)])
def test_orthogonal_has_singular_values_near_one(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    made = orthogonal(torch.randn(shape, generator=generator))
    values = torch.linalg.svdvals(made.float())
    assert made.shape == shape
    assert values.max() < 1.4
    assert values.median() > 0.6


def test_the_optimiser_finds_a_minimum() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = {
        "a": torch.randn(8, 8, generator=generator),
        "norm": torch.randn(8, generator=generator),
    }
    weights = {name: torch.zeros_like(value).requires_grad_() for name, value in wanted.items()}
    optimizer = Optimizer(weights, by_adam=())
    for step in range(1, 301):
        distance = sum(((weights[name] - wanted[name]) ** 2).sum() for name in wanted)
        gradients = torch.autograd.grad(distance, list(weights.values()))
        optimizer.step(
            dict(zip(weights, gradients, strict=True)), pace(step, 0.2 * (1 - step / 301))
        )
    for name, value in wanted.items():
        assert (weights[name] - value).abs().max() < 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 1}, r"steps must be in \[2, "),
        ({"bits": 3}, "bits must be 0, 4 or 8, got 3"),
        ({"kv_layers": "1;2"}, "kv_layers must be auto or numbers such as 18,23, got '1;2'"),
        ({"length": 32, "unroll": 31}, r"unroll must be in|unroll must be below"),
        ({"survival": 1.5}, r"survival must be in \[0, 1\], got 1.5"),
    ],
)
def test_a_wrong_recipe_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**settings)  # type: ignore[arg-type]


def test_layers_that_the_target_lacks_are_refused() -> None:
    assert Recipe(kv_layers="0,1").given_layers("kv_layers", ARCH) == (0, 1)
    assert Recipe().given_layers("kv_layers", ARCH) is None
    with pytest.raises(ConfigError, match=r"kv_layers must be in \[0, 1\], got \[2\]"):
        Recipe(kv_layers="2").given_layers("kv_layers", ARCH)
    with pytest.raises(ConfigError, match=r"feature_layers must be in \[1, 2\], got \[0\]"):
        Recipe(feature_layers="0").given_layers("feature_layers", ARCH)


def test_requests_are_of_many_kinds_and_documents_hold_their_texts() -> None:
    chance = random.Random(0)
    assert len({request(chance)[0] for _ in range(400)}) > 100
    for _ in range(200):
        text = document_request(chance, ["Ada met Bob. They left.", "It rained in Oslo."])
        assert "Ada met Bob. They left.\nIt rained in Oslo." in text
        assert "[]" not in text
        assert "{}" not in text
        piece = excerpt(chance, "Ada met Bob. They left. It rained.")
        assert piece
        assert piece in "Ada met Bob. They left. It rained."


def test_requests_for_code_rarely_come_twice_and_leave_no_gaps() -> None:
    chance = random.Random(0)
    asked = [code_request(chance) for _ in range(2000)]
    assert len(set(asked)) > 1900
    assert not any("{" in text for text in asked)
    code = "int f(int x) { return x; }"
    about = [about_code(chance, code) for _ in range(200)]
    assert all(code in text for text in about)
    assert len({text.partition(code)[0] for text in about}) > len(ABOUT_CODE) // 2
    assert not any("{l}" in text or "{c}" in text for text in about)


def test_a_replayed_function_gets_its_kind_and_tensors_on_a_cpu() -> None:
    total = torch.zeros(3)

    def add(kind: int, values: torch.Tensor) -> torch.Tensor:
        total.add_(values, alpha=kind)
        return total.sum()

    replayed = Replay(add, torch.device("cpu"))
    assert [float(replayed(kind, torch.ones(3))) for kind in (1, 1, 2)] == [3, 6, 12]
