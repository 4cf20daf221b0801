"""The same reply with several widths: the text is the same, the clock is not.

    python examples/compare_k.py [PROMPT]

A demonstration, not a benchmark: one prompt, a few runs.
"""

from __future__ import annotations

import sys

import slipstream
from slipstream.types import KSetting

# A kind case: the reply copies from the prompt, and the n-gram drafter looks it up there.
PROMPT = (
    "Repeat the following text word for word.\n\nThe harbour master keeps a log of every ship that "
    "enters the harbour. Each entry in the log names the ship, its captain, its cargo and the hour "
    "at which it entered."
)
WIDTHS: tuple[KSetting, ...] = ("off", 1, 2, 4, 8, "auto")
RUNS = 3

engine = slipstream.load("smollm2-135m")
prompt = sys.argv[1] if len(sys.argv) > 1 else PROMPT
question = [{"role": "user", "content": prompt}]

params = {k: slipstream.SamplingParams(max_tokens=64, k=k) for k in WIDTHS}
replies: dict[KSetting, list[slipstream.Reply]] = {k: [] for k in WIDTHS}
for _ in range(RUNS):  # in turns, so that a slow moment hits all alike
    for k in WIDTHS:
        replies[k] += engine.generate([question], params[k])

print(f"{'k':>4}  {'tok/s':>7}  {'acceptance length':>17}")
for k, runs in replies.items():
    tokens = sum(reply.usage.completion_tokens - 1 for reply in runs)
    seconds = sum(reply.timing.decode_s for reply in runs)
    length = runs[0].speculation.acceptance_length
    print(
        f"{k:>4}  {tokens / seconds:7.1f}  {'-' if length is None else format(length, '.2f'):>17}"
    )

texts = {reply.text for runs in replies.values() for reply in runs}
print("one text" if len(texts) == 1 else "THE TEXTS DIFFER")
sys.exit(len(texts) != 1)
