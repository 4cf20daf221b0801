"""The training loop: batches of conversations, the objective, the schedule, the state on disk.

The target runs along: a batch's keys, values, features and distributions are computed when they are
needed, which is cheaper than keeping 30 kB a token. The learning rate warms up and falls to 0 along
a cosine; over the last part of the steps the matrices are rounded in the forward as the checkpoint
will round them, so that the head learns to live with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.train.acceptance import Rounds, judge
from slipstream.train.checkpoint import load_state, save_state
from slipstream.train.corpus import Shard
from slipstream.train.head import Head, cast, first_weights
from slipstream.train.objective import Objective
from slipstream.train.optimizer import Optimizer, pace
from slipstream.train.recipe import Recipe
from slipstream.train.replay import Replay
from slipstream.train.target import TargetModel

_WARM_UP = 100  # steps
_JUDGED_K = 4
HELD_OUT = 32  # conversations of each shard that no step sees, at most one in eight

Report = Callable[[str, float], None]


class Trainer:
    """One training run.

    Args:
        shards: the text.
        vocab_map: int64 of shape (W,).
        state_path: where the run's state is kept and found.
    """

    def __init__(
        self,
        target: TargetModel,
        head: Head,
        shards: Sequence[Shard],
        vocab_map: Tensor,
        recipe: Recipe,
        state_path: Path,
    ) -> None:
        self.target, self.head, self.vocab_map = target, head, vocab_map.to(target.device)
        self._recipe, self._path = recipe, state_path
        self._held_out = [_greedy(shard, held_out(shard)) for shard in shards]
        self._batches = _Batches(shards, recipe, target.device)
        weights = first_weights(head.config, target, self.vocab_map, recipe.seed, head.members)
        self.weights = {name: value.requires_grad_() for name, value in weights.items()}
        self._optimizer = Optimizer(self.weights, by_adam=("output", "centroids"))
        self._objective = Objective(
            head,
            target,
            self.vocab_map,
            recipe.unroll,
            recipe.survival,
            recipe.sharpness,
            recipe.choice_weight,
        )
        self._step_of = Replay(self._step, target.device)
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self._resume()

    def run(self, report: Report, check_every: int, on_check: Callable[[], None]) -> None:
        """Train to the last step.

        Args:
            report: told (stage, part done).
            check_every: steps between two looks at the held-out text, the state kept each time.
            on_check: called after each of them.
        """
        recipe = self._recipe
        losses: list[Tensor] = []
        while self.step < recipe.steps:
            ids, replies = self._batches.take(self.step)
            losses.append(self._train(ids, replies))
            self.step += 1
            if self.step % 20 == 0 or self.step == recipe.steps:
                report("training", self.step / recipe.steps)
            if self.step % check_every == 0 or self.step == recipe.steps:
                self._check(losses)
                losses = []
                on_check()

    def judge(self, bits: int | None = None, k: int = _JUDGED_K) -> Rounds:
        """Return greedy rounds on the held-out greedy replies, matrices rounded to `bits`."""
        weights = cast(self.head.config, self.weights, self.target.dtype, bits)
        total = Rounds(accepted=(0,) * (k + 1))
        for shard in self._held_out:
            total += judge(
                self.head, weights, self.target, self.vocab_map, shard.ids, shard.replies, k
            )
        return total

    def _train(self, ids: Tensor, replies: Tensor) -> Tensor:
        recipe, device = self._recipe, self.target.device
        part = self.step / recipe.steps
        bits = recipe.bits if part >= recipe.quantize_from else 0
        warm = min((self.step + 1) / _WARM_UP, 1.0)
        rate = recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * part))
        return self._step_of(bits, ids, replies, pace(self.step + 1, rate).to(device))

    def _step(self, bits: int, ids: Tensor, replies: Tensor, pace_of: Tensor) -> Tensor:
        recipe, config, target = self._recipe, self.head.config, self.target
        trace = target.forward(ids, config.feature_layers, config.kv_layers)
        weights = cast(config, self.weights, target.dtype, bits)
        token_weight = replies * (1 - recipe.user_weight) + recipe.user_weight
        loss = self._objective(weights, ids, trace, token_weight)
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        self._optimizer.step(dict(zip(self.weights, gradients, strict=True)), pace_of)
        return loss.detach()

    def _check(self, losses: Sequence[Tensor]) -> None:
        rounds = self.judge(self._recipe.bits or None)  # as the checkpoint is
        self.history.append(
            {
                "step": self.step,
                "loss": float(torch.stack(list(losses)).mean()),
                "acceptance_length": rounds.acceptance_length,
                "by_position": rounds.by_position,
            }
        )
        weights = {f"weights.{name}": value for name, value in self.weights.items()}
        state = {f"state.{name}": value for name, value in self._optimizer.state.items()}
        progress = {"step": self.step, "history": self.history}
        save_state(self._path, weights | state, progress)

    def _resume(self) -> None:
        found = load_state(self._path)
        if found is None:
            return
        tensors, progress = found
        own = {f"weights.{name}": value for name, value in self.weights.items()}
        own |= {f"state.{name}": value for name, value in self._optimizer.state.items()}
        for name, value in own.items():
            if name not in tensors or tensors[name].shape != value.shape:
                raise ConfigError(
                    f"{self._path} was made by another recipe: {name} does not fit",
                    hint="name another --out, or remove it to train from the first step",
                )
            value.data.copy_(tensors[name])
        self.step, self.history = progress["step"], progress["history"]


def held_out(shard: Shard) -> int:
    """Return how many conversations of a shard, its first, are not trained on."""
    return min(HELD_OUT, max(len(shard.ids) // 8, 1))


def _greedy(shard: Shard, count: int) -> Shard:
    """Return the greedy ones among a shard's first conversations."""
    rows = (shard.temperatures[:count] == 0).nonzero().flatten()
    return Shard(
        ids=shard.ids[rows], replies=shard.replies[rows], temperatures=shard.temperatures[rows]
    )


class _Batches:
    """Batches in an order that the seed decides; each epoch takes every conversation once."""

    def __init__(self, shards: Sequence[Shard], recipe: Recipe, device: torch.device) -> None:
        self._device, self._seed = device, recipe.seed
        self._tokens: dict[int, tuple[Tensor, Tensor]] = {}
        for length in sorted({shard.ids.shape[1] for shard in shards}):
            same = [shard for shard in shards if shard.ids.shape[1] == length]
            self._tokens[length] = (
                torch.cat([shard.ids[held_out(shard) :] for shard in same]).to(device),
                torch.cat([shard.replies[held_out(shard) :] for shard in same]).to(device),
            )
        self._rows = {length: max(recipe.batch_tokens // length, 1) for length in self._tokens}
        self._epoch = -1
        self._order: list[tuple[int, Tensor]] = []
        if not self._plan(0):
            raise ConfigError("there are fewer conversations than one batch takes")

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """Return ids (int64) and reply mask of the batch of a step."""
        per_epoch = len(self._plan(0)) if self._epoch < 0 else len(self._order)
        epoch, index = divmod(step, per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._plan(epoch)
        length, rows = self._order[index]
        ids, replies = self._tokens[length]
        return ids[rows].long(), replies[rows]

    def _plan(self, epoch: int) -> list[tuple[int, Tensor]]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        plan: list[tuple[int, Tensor]] = []
        for length, (ids, _) in self._tokens.items():
            order = torch.randperm(len(ids), generator=generator).to(self._device)
            plan += ((length, rows) for rows in _whole(torch.split(order, self._rows[length])))
        return [plan[i] for i in torch.randperm(len(plan), generator=generator).tolist()]


def _whole(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the parts that are as long as the first: a step's shapes never change."""
    return (part for part in parts if len(part) == len(parts[0]))
