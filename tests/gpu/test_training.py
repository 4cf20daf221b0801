"""A training step that is recorded on the GPU is the step that it would have been."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from slipstream.train.corpus import Shard  # noqa: E402
from slipstream.train.head import Head  # noqa: E402
from slipstream.train.recipe import Recipe  # noqa: E402
from slipstream.train.replay import Replay  # noqa: E402
from slipstream.train.target import TargetModel  # noqa: E402
from slipstream.train.trainer import Trainer  # noqa: E402
from tests.tiny import ARCH  # noqa: E402
from tests.train.worlds import random_ids, tiny_head, tiny_target  # noqa: E402

# What torch's compiler warns of while it is imported is not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


Weights = dict[str, torch.Tensor]


def trained(path: Path, recorded: bool) -> tuple[list[float], Weights, Weights]:
    """Train a tiny head for 12 steps; return the losses, the weights and how far they moved."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    device = torch.device("cuda")
    target: TargetModel = tiny_target(device=device)
    head, _, vocab_map = tiny_head()
    replies = torch.ones(24, 32, dtype=torch.bool)
    shard = Shard(ids=random_ids(24, 32).int(), replies=replies, temperatures=torch.zeros(24))
    recipe = Recipe(steps=12, batch_tokens=128, length=32, quantize_from=0.5, learning_rate=1e-3)
    trainer = Trainer(target, Head(head.config, ARCH, device), [shard], vocab_map, recipe, path)
    if not recorded:
        trainer._step_of = Replay(trainer._step, torch.device("cpu"))
    before = {name: value.detach().clone() for name, value in trainer.weights.items()}
    trainer.run(lambda stage, part: None, 1, lambda: None)
    assert len(trainer._step_of._recorded) == (2 if recorded else 0)  # unrounded and rounded
    losses = [entry["loss"] for entry in trainer.history]
    weights = {name: value.detach() for name, value in trainer.weights.items()}
    return losses, weights, {name: value - before[name] for name, value in weights.items()}


def test_recorded_steps_are_plain_steps(tmp_path: Path) -> None:
    losses, weights, _ = trained(tmp_path / "recorded", recorded=True)
    plain_losses, plain, moved = trained(tmp_path / "plain", recorded=False)
    assert losses == pytest.approx(plain_losses, rel=1e-3)
    for name, value in weights.items():
        # Sums come in any order there, and the optimizer divides small gradients by themselves.
        assert moved[name].norm() > 0
        assert (value - plain[name]).norm() < 0.1 * moved[name].norm(), name
