"""Many conversations at once: the model writes the user's turns and its own replies.

All sequences of a batch are at the same position, which keeps attention free of masks and padding:
a sequence that still has given tokens takes the next of them, the others what was drawn. Between
two turns the template's own markers are taken (`train.turns`). Each position has noise of its own,
so what a batch says depends on the seed and the batch alone, and a drafter can be judged under the
very noise that a reply was drawn with.

What all openings of a batch have given is read in one forward; from there on it is token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.train.acceptance import chunks
from slipstream.train.fuse import fuse
from slipstream.train.target import TargetModel, logits_of
from slipstream.train.turns import TurnScript

USER, REPLY = 0, 1
_READ_AT_ONCE = 256  # given tokens, or a multiple: few lengths, since each is compiled for itself


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How one conversation begins.

    Attributes:
        ids: the given tokens.
        role: who goes on after them, USER or REPLY.
        temperatures: of the user's turns and of the replies; 0 is greedy.
        limits: tokens of the user's turns and of the replies at most.
    """

    ids: list[int]
    role: int
    temperatures: tuple[float, float]
    limits: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """What was written.

    Attributes:
        ids: int64 of shape (B, T).
        replies: bool of shape (B, T), True for a reply's tokens, its end marker included.
    """

    ids: Tensor
    replies: Tensor


def gumbel(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    """Return Gumbel noise, float32 of shape (rows, columns), a function of the arguments alone."""
    return _waits(rows, columns, seed, device).clamp_(min=1e-30).log_().neg_()


def _waits(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(rows, columns, device=device).exponential_(generator=generator)


def _choose(logits: Tensor, barred: Tensor, temperatures: Tensor, waits: Tensor) -> Tensor:
    """Return the winner of each row's Gumbel race, noise made on the way."""
    noise = waits.clamp(min=1e-30).log().neg()
    return (logits + barred + temperatures[:, None] * noise).argmax(1)


@torch.no_grad()
def converse(
    target: TargetModel,
    script: TurnScript,
    openings: list[Opening],
    length: int,
    seed: int,
    report: Callable[[float], None] = lambda part: None,
) -> Conversations:
    """Write one conversation for each opening.

    Args:
        length: tokens of each, its opening included; an opening that is longer is cut.
        seed: position p has noise `gumbel(B, V, seed + p)`.
        report: told the part done.
    """
    device, batch = target.device, len(openings)
    given_len = torch.tensor([len(item.ids) for item in openings], device=device)
    given = torch.zeros(batch, length, dtype=torch.long)
    for row, item in enumerate(openings):
        taken = item.ids[:length]
        given[row, : len(taken)] = torch.tensor(taken)
    given = given.to(device)
    turns = _Turns(script, openings, target.arch.vocab_size, device)
    cache = _Cache(target, batch, length)
    replies = torch.zeros(batch, length, dtype=torch.bool, device=device)
    shortest = min(min(len(item.ids) for item in openings), length)
    choose = fuse(_choose, device)
    read = (shortest - 1) // _READ_AT_ONCE * _READ_AT_ONCE
    if read > 0:
        cache.read(given[:, :read])
    for position in range(max(read, 0), length - 1):
        hidden = cache.step(given[:, position], position)
        if position + 1 < shortest:
            continue
        logits = logits_of(hidden, target.output)
        waits = _waits(batch, logits.shape[1], seed + position + 1, device)
        drawn = choose(logits, turns.barred, turns.temperature(), waits)
        free = position + 1 >= given_len
        tokens, is_reply = turns.take(drawn, free)
        given[:, position + 1] = torch.where(free, tokens, given[:, position + 1])
        replies[:, position + 1] = free & is_reply
        if position % 32 == 0:
            report((position + 1) / length)
    report(1.0)
    return Conversations(ids=given, replies=replies)


class _Turns:
    """Whose turn it is in each sequence, and which marker comes next."""

    def __init__(
        self, script: TurnScript, openings: list[Opening], vocab_size: int, device: torch.device
    ) -> None:
        markers = (script.to_reply, script.to_user)
        self._len = torch.tensor([len(item) for item in markers], device=device)
        self._markers = torch.zeros(2, int(self._len.max()), dtype=torch.long, device=device)
        for row, item in enumerate(markers):
            self._markers[row, : len(item)] = torch.tensor(item, device=device)
        self._is_stop = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._is_stop[list(script.stop_ids)] = True
        self.barred = torch.zeros(vocab_size, device=device)
        self.barred[list(script.banned_ids)] = -torch.inf
        self._role = torch.tensor([item.role for item in openings], device=device)
        self._temperatures = torch.tensor([item.temperatures for item in openings], device=device)
        self._limits = torch.tensor([item.limits for item in openings], device=device)
        self._next = torch.full_like(self._role, -1)  # of the marker; -1 within a turn
        self._turn_len = torch.zeros_like(self._role)

    def temperature(self) -> Tensor:
        """Return each sequence's temperature, float32 of shape (B,)."""
        return self._of(self._temperatures).float()

    def take(self, drawn: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens that stand, and which belong to a reply; sequences not free wait."""
        is_over = self._is_stop[drawn] | (self._turn_len >= self._of(self._limits))
        marker = torch.where((self._next < 0) & is_over, 0, self._next)
        is_marker = marker >= 0
        tokens = torch.where(is_marker, self._markers[self._role, marker.clamp(min=0)], drawn)
        is_reply = (self._role == REPLY) & (marker <= 0)
        after = torch.where(is_marker, marker + 1, -1)
        is_done = after == self._len[self._role]
        length = torch.where(is_done | is_marker, 0, self._turn_len + 1)
        self._role = torch.where(free & is_done, 1 - self._role, self._role)
        self._next = torch.where(free, torch.where(is_done, -1, after), self._next)
        self._turn_len = torch.where(free, length, self._turn_len)
        return tokens, is_reply

    def _of(self, table: Tensor) -> Tensor:
        return table.gather(1, self._role[:, None]).squeeze(1)


class _Cache:
    """K and V of all positions so far, one decoding step at a time."""

    def __init__(self, target: TargetModel, batch: int, length: int) -> None:
        heads = target.attention
        shape = (2, batch, heads.num_kv_heads, length, heads.head_dim)
        self._target = target
        self._kv = [
            torch.empty(shape, device=target.device, dtype=target.dtype) for _ in target.layers
        ]

    def read(self, ids: Tensor) -> None:
        """Take the first tokens of each sequence, of shape (B, T)."""
        layers = range(len(self._kv))
        for rows in chunks(ids):
            trace = self._target.forward(ids[rows], kv_layers=layers)
            for kv, (k, v) in zip(self._kv, trace.kv, strict=True):
                kv[0, rows, :, : ids.shape[1]] = k
                kv[1, rows, :, : ids.shape[1]] = v

    def step(self, ids: Tensor, position: int) -> Tensor:
        """Return the normed hidden state of shape (B, H) after one token of each sequence."""
        target = self._target
        at = slice(position, position + 1)
        cos, sin = target.cos[at], target.sin[at]
        x = F.embedding(ids[:, None], target.embedding)
        for layer, kv in zip(target.layers, self._kv, strict=True):
            q, k, v = target.project(x, layer, cos, sin)
            kv[0, :, :, at] = k
            kv[1, :, :, at] = v
            x = target.finish(x, _attend(q, kv[:, :, :, : position + 1]), layer)
        return target.normed(x, target.norm)[:, 0]


def _attend(q: Tensor, kv: Tensor) -> Tensor:
    """Return one query's attention over all keys given, of shape (B, heads, 1, head_dim)."""
    # Heads that share keys become rows of one query block, so keys are read once.
    batch, heads, _, width = q.shape
    grouped = q.reshape(batch, kv.shape[2], -1, width)
    return F.scaled_dot_product_attention(grouped, kv[0], kv[1]).reshape(batch, heads, 1, width)
