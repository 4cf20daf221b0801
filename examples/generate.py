"""One reply, and what speculation did for it.

python examples/generate.py [PROMPT]
"""

from __future__ import annotations

import sys

import slipstream

engine = slipstream.load("smollm2-135m")
prompt = sys.argv[1] if len(sys.argv) > 1 else "Name three colours of the rainbow."
question = [{"role": "user", "content": prompt}]
(reply,) = engine.generate([question], slipstream.SamplingParams(max_tokens=64))

print(reply.text)
report = reply.speculation
print(f"{reply.usage.completion_tokens} tokens, {reply.timing.decode_tokens_per_s:.1f} tok/s")
print(f"{report.accepted} of {report.drafted} drafted tokens accepted; {report.reason}")
