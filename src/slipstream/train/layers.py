"""Which of the target's layers a head looks at, when the recipe leaves it open.

Much of what a drafter can foresee is a copy of something earlier. The target's own induction heads
(Olsson et al. 2022, arXiv 2209.11895) keep keys that know the token before them, so a query-only
layer on such a layer's KV can look up what came next. They are found by showing the target random
tokens twice: the share of attention that goes from a token to the one after its first occurrence.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from slipstream.train.target import TargetModel

_SEQUENCES, _TOKENS = 8, 48


@torch.no_grad()
def copying_scores(target: TargetModel, seed: int = 0) -> list[float]:
    """Return, for each layer, the share of attention that its best KV head gives to copying."""
    arch, attention = target.arch, target.attention
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(arch.vocab_size, (_SEQUENCES, _TOKENS), generator=generator)
    ids = torch.cat([half, half], 1).to(target.device)
    cos, sin = target.cos[: 2 * _TOKENS], target.sin[: 2 * _TOKENS]
    again = torch.arange(_TOKENS, 2 * _TOKENS - 1, device=target.device)
    above = torch.ones(2 * _TOKENS, 2 * _TOKENS, device=target.device).triu(1).bool()
    x = F.embedding(ids, target.embedding)
    scores = []
    for layer in target.layers:
        q, k, v = target.project(x, layer, cos, sin)
        k = k.repeat_interleave(attention.num_heads // attention.num_kv_heads, 1)
        v = v.repeat_interleave(attention.num_heads // attention.num_kv_heads, 1)
        similar = (q @ k.mT).float() / attention.head_dim**0.5
        shares = similar.masked_fill(above, -torch.inf).softmax(-1)
        by_head = shares[:, :, again, again - _TOKENS + 1].mean((0, 2))
        scores.append(float(by_head.unflatten(0, (attention.num_kv_heads, -1)).mean(1).max()))
        x = target.finish(x, shares.to(v.dtype) @ v, layer)
    return scores


def choose_kv_layers(scores: list[float]) -> tuple[int, ...]:
    """Return up to four layers, from the best copier to the last but one, evenly spaced.

    With SmolLM2-135M, layers further back than its best copier were not tried; each layer added
    between it and the end was worth more than a wider MLP.
    """
    best = max(range(len(scores)), key=scores.__getitem__)
    last = max(len(scores) - 2, best)
    return tuple(sorted({best + (last - best) * part // 3 for part in range(4)}))


def choose_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Return features at a third, two thirds and the end, as EAGLE-3 takes them."""
    return tuple(sorted({max(num_layers // 3, 1), max(2 * num_layers // 3, 1), num_layers}))
