"""A reply as it is made: one line a round, with the accepted draft tokens it brought.

python examples/stream.py [PROMPT]
"""

from __future__ import annotations

import sys

import slipstream

# A text that repeats itself, so that the n-gram drafter has something to copy.
PROMPT = "Repeat after me: the cat sat on the mat, the cat sat on the hat, the cat sat on the bat."

engine = slipstream.load("smollm2-135m")
prompt = sys.argv[1] if len(sys.argv) > 1 else PROMPT
question = [{"role": "user", "content": prompt}]

for chunk in engine.stream(question, slipstream.SamplingParams(max_tokens=64)):
    print(f"{chunk.accepted:2} accepted  {chunk.text!r}")
