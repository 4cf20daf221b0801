"""The text that a head learns from, written by its target and kept in shards.

A shard is a batch of conversations in one safetensors file. In three of four shards the model
writes both sides. The fourth is put together of such text, twice as long: documents, something to
do about them, and replies that are sentences of the document. They teach copying from far back, and
since the head learns the target's distribution over a text, that text need not be the target's
reply. A shard depends on the seed, its number and the shards before it, and appears under its name
only once it is whole; so a run that was stopped goes on with the next one.

Replies are drawn at temperatures from 0 to 1, more of them at 0, which is where most are served.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import LoadError
from slipstream.models.loading import ModelFile
from slipstream.train.generate import USER, Opening, converse
from slipstream.train.openings import SYSTEMS, document_request, excerpt, request
from slipstream.train.recipe import Recipe
from slipstream.train.target import TargetModel
from slipstream.train.turns import TurnScript, read_script, user_frame

REPLY_TEMPERATURES = (0.0, 0.0, 0.0, 0.3, 0.7, 1.0)
_USER_TEMPERATURES = (0.6, 0.8, 1.0)
_DOCUMENTS_EVERY = 4
_TEXT_ROWS = 2048  # conversations of a shard whose replies become documents
_POSITIONS = 1 << 32  # noise seeds of a shard, one a position


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A batch of conversations.

    Attributes:
        ids: int32 of shape (B, T).
        replies: bool of shape (B, T), True for a reply's tokens.
        temperatures: float32 of shape (B,), of the replies.
    """

    ids: Tensor
    replies: Tensor
    temperatures: Tensor


def write_shards(
    folder: Path,
    file: ModelFile,
    target: TargetModel,
    recipe: Recipe,
    report: Callable[[str, float], None],
) -> None:
    """Write the recipe's shards that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    script = read_script(file)
    frames = {system: user_frame(file, system) for system in ("", *SYSTEMS)}
    for number in range(recipe.shards):
        path = folder / f"shard-{recipe.seed}-{number:04}.safetensors"
        if path.exists():
            continue
        chance = random.Random(f"{recipe.seed} {number}")
        with_documents = number % _DOCUMENTS_EVERY == _DOCUMENTS_EVERY - 1
        if with_documents:
            texts = list(_texts(folder, file, recipe, range(number), chance))
            count, length = max(recipe.conversations // 2, 1), 2 * recipe.length
            together = [
                _documents(file, script, frames[""], texts, chance, length) for _ in range(count)
            ]
            ids, replies = (torch.tensor(part) for part in zip(*together, strict=True))
            _save(path, ids, replies, torch.ones(count))
            continue
        openings = [
            _request(file, frames, chance, recipe.length) for _ in range(recipe.conversations)
        ]
        seed = (recipe.seed << 20 | number) * _POSITIONS & (1 << 62) - 1
        stage = f"shard {number + 1} of {recipe.shards}"
        written = converse(target, script, openings, recipe.length, seed, partial(report, stage))
        temperatures = torch.tensor([item.temperatures[1] for item in openings])
        _save(path, written.ids, written.replies, temperatures)


def read_shard(path: Path) -> Shard:
    """Read one shard.

    Raises:
        LoadError: it is damaged.
    """
    try:
        stored = load_file(path)
        return Shard(
            ids=stored["ids"].view(torch.uint16).int() if "ids" in stored else stored["wide_ids"],
            replies=stored["replies"].bool(),
            temperatures=stored["temperatures"],
        )
    except (OSError, SafetensorError, KeyError) as error:
        raise LoadError(
            f"{path} cannot be read: {error}", hint="remove it, and it is written again"
        ) from error


def _save(path: Path, ids: Tensor, replies: Tensor, temperatures: Tensor) -> None:
    is_narrow = int(ids.max()) < 1 << 16
    stored = {
        "ids" if is_narrow else "wide_ids": ids.cpu().to(
            torch.uint16 if is_narrow else torch.int32
        ),
        "replies": replies.cpu().to(torch.uint8),
        "temperatures": temperatures,
    }
    unfinished = path.with_suffix(".partial")
    save_file(stored, unfinished)
    os.replace(unfinished, path)


def _request(
    file: ModelFile, frames: Mapping[str, tuple[str, str]], chance: random.Random, length: int
) -> Opening:
    opening, system = request(chance)
    ids = file.tokenizer.encode(frames[system][0] + opening, parse_special=True)
    is_text = opening.endswith((":\n\n", "Text:\n\n", "{}"))
    longest = length // 2 if is_text else length // 4
    return Opening(
        ids=ids,
        role=USER,
        temperatures=(chance.choice(_USER_TEMPERATURES), chance.choice(REPLY_TEMPERATURES)),
        limits=(chance.randint(max(longest // 4, 1), longest), _reply_limit(chance, length)),
    )


def _documents(
    file: ModelFile,
    script: TurnScript,
    frame: tuple[str, str],
    texts: Sequence[str],
    chance: random.Random,
    length: int,
) -> tuple[list[int], list[bool]]:
    """Return ids and reply mask of a conversation about documents, `length` tokens long."""
    encode = partial(file.tokenizer.encode, parse_special=False)
    ids = file.tokenizer.encode(frame[0], parse_special=True)
    is_reply = [False] * len(ids)
    while len(ids) < length:
        chosen = [chance.choice(texts) for _ in range(chance.choice((1, 1, 2, 3, 4)))]
        asked = [*encode(document_request(chance, chosen)), *script.to_reply]
        answer = [*encode(excerpt(chance, chance.choice(chosen))), script.to_user[0]]
        ids += [*asked, *answer, *script.to_user[1:]]
        is_reply += [False] * len(asked) + [True] * len(answer)
        is_reply += [False] * (len(script.to_user) - 1)
    return ids[:length], is_reply[:length]


def _reply_limit(chance: random.Random, length: int) -> int:
    return chance.randint(max(length // 6, 1), max(length // 2, 1))


def _texts(
    folder: Path, file: ModelFile, recipe: Recipe, numbers: range, chance: random.Random
) -> Iterator[str]:
    """Yield texts out of earlier shards' replies, at least one."""
    pool = [n for n in numbers if n % _DOCUMENTS_EVERY != _DOCUMENTS_EVERY - 1]
    shard = read_shard(folder / f"shard-{recipe.seed}-{chance.choice(pool):04}.safetensors")
    for row in range(min(len(shard.ids), _TEXT_ROWS)):
        edges = torch.diff(shard.replies[row].int(), prepend=torch.zeros(1, dtype=torch.int32))
        starts, ends = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
        for start, end in zip(starts.tolist(), ends.tolist(), strict=False):
            ids = shard.ids[row, start:end].tolist()
            if len(ids) < recipe.length // 12 or len(set(ids)) * 3 < len(ids):
                continue  # too short, or a reply that went round in circles
            text = file.tokenizer.decode(ids).strip()
            if text:
                yield text
    yield "Nothing was written."
