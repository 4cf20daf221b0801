"""The text that a head learns from, written by its target and kept in shards.

A shard is a batch of conversations in one safetensors file, of one of three kinds:

- *talk*: the model writes both sides, from an opening or a whole request for code on;
- *answers*: it answers requests about documents, and goes on from there; the documents are replies
  of earlier talk, and a conversation is twice as long;
- *copies*: documents and requests again, but the replies are sentences of the document. They teach
  copying from far back, and since the head learns the target's distribution over a text, that text
  need not be the target's reply.

A shard depends on the seed, its number and the shards before it, and appears under its name only
once it is whole; so a run that was stopped goes on with the next one. Replies are drawn at
temperatures from 0 to 1, more of them at 0, which is where most are served.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import LoadError
from slipstream.models.loading import ModelFile
from slipstream.train.code_requests import about_code, code_request
from slipstream.train.generate import REPLY, USER, Opening, converse
from slipstream.train.openings import SYSTEMS, document_request, excerpt, request
from slipstream.train.recipe import Recipe
from slipstream.train.target import TargetModel
from slipstream.train.turns import TurnScript, read_script, user_frame

REPLY_TEMPERATURES = (0.0, 0.0, 0.0, 0.3, 0.7, 1.0)
_USER_TEMPERATURES = (0.6, 0.8, 1.0)
_TALK, _ANSWERS, _COPIES = "talk", "answers", "copies"
_KINDS = (_TALK, _TALK, _ANSWERS, _COPIES)  # of shards, over and over
_TEXT_ROWS = 4096  # conversations of a shard whose replies become documents
_CODE, _ABOUT_CODE = 0.22, 0.06  # shares of whole requests in talk
_FENCED = re.compile(r"```\w*\n(.+?)```", re.DOTALL)
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
        kind = _KINDS[number % len(_KINDS)]
        texts = list(_texts(folder, file, recipe, number))
        writer = _Writer(file, script, frames, texts, recipe.length)
        count = recipe.conversations
        if kind != _TALK:
            count = max(count // 2, 1)
        chances = [random.Random(f"{recipe.seed} {number} {row}") for row in range(count)]
        with ThreadPoolExecutor() as pool:  # the tokenizer works without the interpreter's lock
            if kind == _COPIES:
                together = list(pool.map(writer.copies, chances))
                ids, replies = (torch.tensor(part) for part in zip(*together, strict=True))
                _save(path, ids, replies, torch.ones(count))
                continue
            openings = list(pool.map(writer.talk if kind == _TALK else writer.asked, chances))
        seed = (recipe.seed << 20 | number) * _POSITIONS & (1 << 62) - 1
        stage = partial(report, f"shard {number + 1} of {recipe.shards}")
        length = recipe.length if kind == _TALK else 2 * recipe.length
        written = converse(target, script, openings, length, seed, stage)
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


class _Writer:
    """Draws how conversations begin.

    Args:
        frames: what stands before the user's text and after it, by system message.
        texts: earlier replies; may be empty.
        length: tokens of a conversation.
    """

    def __init__(
        self,
        file: ModelFile,
        script: TurnScript,
        frames: Mapping[str, tuple[str, str]],
        texts: Sequence[str],
        length: int,
    ) -> None:
        self._file, self._script, self._frames = file, script, frames
        self._texts = texts or ["Nothing was written."]
        self._code = [piece for text in texts for piece in _FENCED.findall(text)]
        self._length = length

    def talk(self, chance: random.Random) -> Opening:
        """Draw the opening of a conversation that the model writes."""
        kind, length = chance.random(), self._length
        if kind < _CODE:
            return self._whole(chance, code_request(chance), longest=length * 3 // 4)
        if kind < _CODE + _ABOUT_CODE and self._code:
            code = chance.choice(self._code)[:length]
            return self._whole(chance, about_code(chance, code), longest=length * 3 // 4)
        opening, system = request(chance)
        is_text = opening.endswith((":\n\n", "Text:\n\n", "{}"))
        longest = length // 2 if is_text else length // 4
        return Opening(
            ids=self._file.tokenizer.encode(self._frames[system][0] + opening, parse_special=True),
            role=USER,
            temperatures=(chance.choice(_USER_TEMPERATURES), chance.choice(REPLY_TEMPERATURES)),
            limits=(
                chance.randint(max(longest // 4, 1), longest),
                _reply_limit(chance, length // 2, length),
            ),
        )

    def asked(self, chance: random.Random) -> Opening:
        """Draw a request about documents, 0.9 to 1.5 times `length` long."""
        wanted = chance.randint(self._length * 9 // 10, self._length * 3 // 2)
        text, count = "", 0
        while count < wanted:
            piece = chance.choice(self._texts)
            text, count = f"{text}{piece}\n", count + self._count(piece)
        text = text[: len(text) * wanted // count]
        while True:
            text = text if text.strip() else "Nothing."
            opening = self._whole(chance, document_request(chance, [text]), self._length // 2)
            if len(opening.ids) <= self._length * 7 // 4 or len(text) < 8:
                return opening
            text = text[: len(text) * 3 // 4]

    def copies(self, chance: random.Random) -> tuple[list[int], list[bool]]:
        """Return ids and reply mask of requests answered with sentences of their documents."""
        length, script = 2 * self._length, self._script
        encode = partial(self._file.tokenizer.encode, parse_special=False)
        ids = self._file.tokenizer.encode(self._frames[""][0], parse_special=True)
        is_reply = [False] * len(ids)
        while len(ids) < length:
            chosen = [chance.choice(self._texts) for _ in range(chance.choice((1, 1, 2, 3, 4)))]
            asked = [*encode(document_request(chance, chosen)), *script.to_reply]
            answer = [*encode(excerpt(chance, chance.choice(chosen))), script.to_user[0]]
            ids += [*asked, *answer, *script.to_user[1:]]
            is_reply += [False] * len(asked) + [True] * len(answer)
            is_reply += [False] * (len(script.to_user) - 1)
        return ids[:length], is_reply[:length]

    def _whole(self, chance: random.Random, asked: str, longest: int) -> Opening:
        tokenizer, frame = self._file.tokenizer, self._frames[""][0]
        ids = tokenizer.encode(frame, parse_special=True)
        ids = [*ids, *tokenizer.encode(asked, parse_special=False), *self._script.to_reply]
        limit = self._length // 4
        return Opening(
            ids=ids,
            role=REPLY,
            temperatures=(chance.choice(_USER_TEMPERATURES), chance.choice(REPLY_TEMPERATURES)),
            limits=(
                chance.randint(max(limit // 4, 1), limit),
                _reply_limit(chance, longest, self._length),
            ),
        )

    def _count(self, text: str) -> int:
        return len(self._file.tokenizer.encode(text, parse_special=False))


def _reply_limit(chance: random.Random, longest: int, length: int) -> int:
    return chance.randint(max(length // 6, 1), max(longest, length // 6, 1))


def _texts(folder: Path, file: ModelFile, recipe: Recipe, number: int) -> Iterator[str]:
    """Yield texts out of the replies of the last talk before a shard, if there is any."""
    pool = [n for n in range(number) if _KINDS[n % len(_KINDS)] == _TALK]
    if not pool:
        return
    shard = read_shard(folder / f"shard-{recipe.seed}-{pool[-1]:04}.safetensors")
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
