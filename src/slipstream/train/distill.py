"""From a model to a checkpoint: write the text, choose the vocabulary, train, write, judge."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream import __version__
from slipstream.errors import ConfigError
from slipstream.models.arch import Arch
from slipstream.models.loading import ModelFile
from slipstream.models.loading.assistant import write_assistant
from slipstream.models.loading.assistant_config import (
    AssistantConfig,
    AssistantTarget,
    ClusterCounts,
    check_config,
)
from slipstream.train.acceptance import Rounds
from slipstream.train.clusters import cluster_rows
from slipstream.train.corpus import Shard, read_shard, write_shards
from slipstream.train.evaluate import Prompt, judge_replies, write_replies
from slipstream.train.head import Head, cast
from slipstream.train.layers import choose_feature_layers, choose_kv_layers, copying_scores
from slipstream.train.recipe import Recipe
from slipstream.train.target import TargetModel, check_arch, load_target
from slipstream.train.trainer import Report, Trainer
from slipstream.train.turns import read_script
from slipstream.train.vocabulary import choose_vocabulary, count_tokens

_STATE = "training-state.safetensors"
_CHECKS = 10  # looks at the held-out text, and states kept, over a run
_ROOM = 256  # positions beyond a conversation that rotations are tabulated for
REPLY_TOKENS = 128  # of a reply to a given prompt


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a head reaches on given prompts.

    Attributes:
        temperature: of replies and drafts.
        rounds: by category and k.
    """

    temperature: float
    rounds: dict[str, dict[int, Rounds]]

    def overall(self, k: int) -> Rounds:
        """Return all categories' rounds at k."""
        total = Rounds(accepted=(0,) * (k + 1))
        for own in self.rounds.values():
            total += own[k]
        return total


class Distillation:
    """A model, a recipe and the folder of what they make.

    Args:
        file: the target.
        out: the folder; the checkpoint lies in it, the run's state beside it.
        data: the folder of the text, `out / "data"` by default; all shards in it are used.
    """

    def __init__(
        self, file: ModelFile, recipe: Recipe, out: Path, *, device: str, data: Path | None = None
    ) -> None:
        self.file, self.recipe, self.out = file, recipe, out
        self.data = out / "data" if data is None else data
        self.device = _device(device)
        self.target = load_target(
            file,
            device=self.device,
            dtype=torch.bfloat16 if self.device.type == "cuda" else torch.float32,
            max_len=min(file.arch.context_len, max(2 * recipe.length, 4096) + _ROOM),
        )

    def write_text(self, report: Report) -> None:
        """Write the conversations that are not there yet."""
        write_shards(self.data, self.file, self.target, self.recipe, report)

    def train(self, report: Report, on_check: Callable[[Trainer], None]) -> Trainer:
        """Train, from where an earlier run stopped, and write the checkpoint.

        Args:
            on_check: called whenever the held-out text was looked at.
        """
        recipe = self.recipe
        paths = sorted(self.data.glob("*.safetensors"))
        shards = [read_shard(path) for path in paths]
        if not shards:
            raise ConfigError(f"there are no conversations in {self.data}")
        vocab_map, coverage = self._vocabulary(shards)
        config = self._config(len(vocab_map))
        members = None
        if config.clusters is not None:
            rows = self.target.output[vocab_map.to(self.device)].float().cpu()
            members = cluster_rows(rows, config.clusters.count, recipe.seed)
        head = Head(config, self.file.arch, self.device, members)
        trainer = Trainer(self.target, head, shards, vocab_map, recipe, self.out / _STATE)
        data = {
            "shards": [path.name for path in paths],
            "tokens": sum(shard.ids.numel() for shard in shards),
            "sha256": _digest(shards),
            "draft_vocabulary_coverage": coverage,
        }
        every = max(recipe.steps // _CHECKS, 1)

        def check() -> None:
            self._write(trainer, config, data, finished=False)
            on_check(trainer)

        trainer.run(report, every, check)
        self._write(trainer, config, data, finished=True)
        return trainer

    def judge(
        self,
        trainer: Trainer,
        prompts: Sequence[Prompt],
        temperature: float,
        report: Callable[[float], None],
    ) -> Judgement:
        """Return what the head, rounded as its checkpoint is, reaches on prompts."""
        script, recipe = read_script(self.file), self.recipe
        longest = max(len(prompt.ids) for prompt in prompts) + REPLY_TOKENS + recipe.max_k
        if longest > self.target.max_len:
            raise ConfigError(
                f"prompts must have at most {self.target.max_len - REPLY_TOKENS - recipe.max_k} "
                f"tokens, got {longest - REPLY_TOKENS - recipe.max_k}"
            )
        replies = write_replies(
            self.target, script, prompts, REPLY_TOKENS, temperature, recipe.seed, report
        )
        weights = cast(trainer.head.config, trainer.weights, self.target.dtype, recipe.bits)
        rounds = judge_replies(
            trainer.head, weights, self.target, trainer.vocab_map, replies, recipe.max_k
        )
        return Judgement(temperature=temperature, rounds=rounds)

    def _vocabulary(self, shards: Sequence[Shard]) -> tuple[Tensor, float]:
        arch, recipe = self.file.arch, self.recipe
        always = sorted(read_script(self.file).stop_ids)
        size = min(recipe.draft_vocab_size, arch.vocab_size)
        if size < len(always):
            raise ConfigError(f"draft_vocab_size must be at least {len(always)}, got {size}")
        return choose_vocabulary(*count_tokens(shards, arch.vocab_size), size, always)

    def _config(self, draft_vocab_size: int) -> AssistantConfig:
        arch, recipe = self.file.arch, self.recipe
        kv_layers = recipe.given_layers("kv_layers", arch)
        config = AssistantConfig(
            target=AssistantTarget.of(arch, self.file.fingerprint),
            hidden_size=recipe.hidden_size or arch.hidden_size,
            num_heads=arch.uniform.num_heads,
            ffn_size=recipe.ffn_size or arch.ffn_size,
            feature_layers=recipe.given_layers("feature_layers", arch)
            or choose_feature_layers(arch.num_layers),
            kv_layers=kv_layers or choose_kv_layers(copying_scores(self.target)),
            draft_vocab_size=draft_vocab_size,
            max_k=recipe.max_k,
            bits=recipe.bits or None,
            lean=recipe.lean,
            embedding_scale=_unit_scale(self.target) if recipe.lean else 1.0,
            clusters=self._clusters(draft_vocab_size),
        )
        check_config(config)
        return config

    def _clusters(self, draft_vocab_size: int) -> ClusterCounts | None:
        count = self.recipe.clusters
        if not count:
            return None
        if draft_vocab_size % count:
            raise ConfigError(
                f"clusters must divide the {draft_vocab_size} draft tokens, got {count}"
            )
        return ClusterCounts(count=count, top=self.recipe.top_clusters)

    def _write(
        self, trainer: Trainer, config: AssistantConfig, data: dict[str, Any], finished: bool
    ) -> None:
        members = trainer.head.members
        training = {
            "by": f"slipstream {__version__}, torch {torch.__version__}",
            "finished": finished,
            "recipe": dataclasses.asdict(self.recipe),
            "data": data,
            "held_out": trainer.history[-1:],
        }
        write_assistant(
            self.out,
            config,
            {name: value.detach().cpu().numpy() for name, value in trainer.weights.items()},
            trainer.vocab_map.cpu().numpy().astype(np.int32),
            training,
            None if members is None else members.cpu().numpy().astype(np.int32),
        )


def _unit_scale(target: TargetModel) -> float:
    """Return what gives the embedding's rows a mean square of about 1."""
    return float(target.embedding.float().square().mean().rsqrt())


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda is not there", hint="use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _digest(shards: Sequence[Shard]) -> str:
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(shard.ids.numpy().tobytes())
    return digest.hexdigest()


def check_out(out: Path, recipe: Recipe, arch: Arch) -> None:
    """Refuse a folder that another recipe has begun, and remember this one's.

    Raises:
        ConfigError: a setting differs from that of the run in the folder, or a layer is not there.
        LoadError: the target has what distillation does not run.
    """
    check_arch(arch)
    for name in ("kv_layers", "feature_layers"):
        recipe.given_layers(name, arch)
    path = out / "recipe.json"
    ours = dataclasses.asdict(recipe)
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")
        return
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="remove it") from error
    for name, value in ours.items():
        if not isinstance(theirs, dict) or theirs.get(name) != value:
            got = theirs.get(name) if isinstance(theirs, dict) else None
            raise ConfigError(
                f"{out} holds a run with {name} {got}, not {value}",
                hint="give the same settings to go on with it, or name another --out",
            )
