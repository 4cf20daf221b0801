"""What would make a benchmark's numbers mislead; each is a reason not to run it.

- Repeated prompts: a drafter that looks up what was said has seen the answer. One report of a
  tenfold speedup came from one prompt sent again and again (llama.cpp issue 26100).
- Random tokens: text that no model has seen is continued unlike text that people write; speedups on
  it were off by a quarter (SPEED-Bench).
- Too few tokens: the interval could not be as narrow as it is asked to be.

Randomness is judged by the model itself, by its surprise at the prompt, so any language, program or
notation that the model knows is fine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.bench.model import Model
from slipstream.bench.plan import Limits, tokens_needed
from slipstream.bench.workload import Conversation, Workload
from slipstream.engine.budget import RowBudget
from slipstream.engine.pages import pages_for
from slipstream.kernels.ops import Rows

# Prompts are alike if they share this much of the shorter one's runs of so many words.
RUN, ALIKE = 6, 0.8
# A prompt repeats itself if less than this share of its runs is new; tables and code do a little.
NEW, MANY_RUNS = 0.35, 40
# Surprise at random tokens is above that of guessing blindly, ln V. At the hardest of 240 texts in
# several languages it was 0.77 of that, at most of them half.
RANDOM = 0.9
# Thai to Khmer, kana, Chinese characters.
_SPACELESS = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
SURPRISE_TOKENS, FEWEST_TOKENS = 48, 16


@dataclass(frozen=True, kw_only=True)
class Misleading:
    """Why a benchmark misleads.

    Attributes:
        kind: repeated_prompts, self_repeating_prompt, random_tokens or too_few_tokens.
    """

    kind: str
    text: str


def misleading(
    workload: Workload, model: Model, limits: Limits, *, judge_text: bool = True
) -> list[Misleading]:
    """Return everything that speaks against a workload, worst first.

    Args:
        judge_text: the model knows text from random tokens.
    """
    return [
        *_repeated(workload),
        *_self_repeating(workload),
        *(_random(workload, model) if judge_text else ()),
        *_too_few(workload, limits),
    ]


def _repeated(workload: Workload) -> list[Misleading]:
    """Compare every prompt with those before it, by the runs of words that they share."""
    out: list[Misleading] = []
    seen: dict[tuple[str, ...], int] = {}
    texts: list[tuple[str, set[tuple[str, ...]]]] = []
    for conversation, turn in _turns(workload):
        words = _words(turn)
        runs = _runs(words) or {tuple(words)}
        shared: dict[int, int] = {}
        for run in runs:
            if run in seen:
                shared[seen[run]] = shared.get(seen[run], 0) + 1
        for other, count in shared.items():
            if count >= ALIKE * min(len(runs), len(texts[other][1])):
                out.append(
                    Misleading(
                        kind="repeated_prompts",
                        text=f"prompt {conversation.id} ({conversation.category}) repeats prompt "
                        f"{texts[other][0]}",
                    )
                )
                break
        for run in runs:
            seen.setdefault(run, len(texts))
        texts.append((conversation.id, runs))
    return out


def _self_repeating(workload: Workload) -> list[Misleading]:
    out = []
    for conversation, turn in _turns(workload):
        words = _words(turn)
        total = len(words) - RUN + 1
        if total >= MANY_RUNS and len(_runs(words)) < NEW * total:
            out.append(
                Misleading(
                    kind="self_repeating_prompt",
                    text=f"prompt {conversation.id} ({conversation.category}) is one passage "
                    "repeated",
                )
            )
    return out


def _random(workload: Workload, model: Model) -> list[Misleading]:
    limit = RANDOM * float(np.log(model.target.arch.vocab_size))
    out = []
    for conversation, turn in _turns(workload):
        ids = model.ids(turn)
        # The end is judged too, where it is not the beginning.
        windows = [ids, ids[-SURPRISE_TOKENS:]] if len(ids) >= 2 * SURPRISE_TOKENS else [ids]
        surprises = [surprise_at(model, window) for window in windows]
        surprise = max((found for found in surprises if found is not None), default=0.0)
        if surprise > limit:
            out.append(
                Misleading(
                    kind="random_tokens",
                    text=f"prompt {conversation.id} ({conversation.category}) is no text to this "
                    f"model: it is surprised by {surprise:.1f} nats a token, more than {limit:.1f}",
                )
            )
    return out


def _too_few(workload: Workload, limits: Limits) -> list[Misleading]:
    needed = tokens_needed(limits.precision)
    out = []
    for batch in limits.batches:
        for category, own in workload.categories.items():
            prompts = len(own) // batch * batch
            tokens = limits.max_tokens * prompts
            # Groups of a batch are few, so there only the row over all categories is judged.
            if (tokens < needed and batch == 1) or prompts // batch < 2:
                out.append(
                    Misleading(
                        kind="too_few_tokens",
                        text=f"{category} at batch {batch}: {prompts // batch} groups with at most "
                        f"{tokens} tokens, and an interval of {100 * limits.precision:g} % either "
                        f"side takes two groups and {needed} tokens",
                    )
                )
    return out


def surprise_at(model: Model, token_ids: Sequence[int]) -> float | None:
    """Return the model's mean surprise at a text's first tokens, nats; None for a short text.

    Raises:
        CapacityError: no pages are free for it.
    """
    target = model.target
    budget = RowBudget.of(model.engine.config, target.arch.vocab_size)
    length = min(len(token_ids), SURPRISE_TOKENS, target.max_model_len)
    if length < FEWEST_TOKENS:
        return None
    pages = model.engine.pages.allocate(pages_for(length))
    total, chunk = 0.0, min(budget.rows, budget.logits, budget.prefill)
    try:
        for start in range(0, length - 1, chunk):
            positions = np.arange(start, min(start + chunk, length - 1), dtype=np.int32)
            rows = Rows(
                token_ids=np.asarray(token_ids, np.int32)[positions],
                positions=positions,
                sequences=np.zeros_like(positions),
                page_table=np.array([pages], np.int32),
                logit_rows=positions - start,
            )
            logits = np.asarray(target.step(rows).logits, np.float64)
            top = logits.max(axis=1)
            norm = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
            said = logits[np.arange(len(positions)), np.asarray(token_ids)[positions + 1]]
            total += float((norm - said).sum())
    finally:
        model.engine.pages.free(pages)
    return total / (length - 1)


def _turns(workload: Workload) -> Iterator[tuple[Conversation, str]]:
    """Yield everything that is asked, with the conversation that asks it."""
    for conversation in workload.conversations:
        for turn in conversation.turns:
            yield conversation, turn


def _words(text: str) -> list[str]:
    """Return words, signs, and single characters of scripts that put no spaces between words."""
    return re.findall(rf"[{_SPACELESS}]|[^\W{_SPACELESS}]+|[^\w\s]", text.lower())


def _runs(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}
