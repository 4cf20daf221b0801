"""Several prompts at once: they share forwards, and each gets the reply it would get alone.

python examples/several_prompts.py
"""

from __future__ import annotations

import sys

import slipstream

PROMPTS = ("Name a colour.", "Name a fruit.", "Name a river in Europe.", "Say good night.")

engine = slipstream.load("smollm2-135m")
questions = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
params = slipstream.SamplingParams(max_tokens=24)

together = engine.generate(questions, params)
alone = [engine.generate([question], params)[0] for question in questions]

for prompt, reply in zip(PROMPTS, together, strict=True):
    print(f"{prompt:<24} {reply.text!r}")
same = [reply.token_ids for reply in together] == [reply.token_ids for reply in alone]
print("the same replies as one by one" if same else "THE REPLIES DIFFER")
sys.exit(not same)
