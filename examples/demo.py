"""Run one prompt with and without speculation and say what it gained, be it a loss.

    python examples/demo.py [MODEL]

The prompt asks for a text that it holds, so the n-gram drafter has something to copy from: a kind
case, not a benchmark. Both arms run twice, in the order classic, speculative, speculative, classic,
on one engine, and must give the same tokens.
"""

from __future__ import annotations

import sys

import slipstream
from slipstream.models.loading import pull
from slipstream.models.loading.names import MODELS

PROMPT = """\
Repeat the following text word for word.

The harbour master keeps a log of every ship that enters the harbour. Each entry in the log names \
the ship, its captain, its cargo and the hour at which it entered. When a ship leaves the harbour, \
the harbour master draws a line through its entry and writes the hour beside it. At the end of the \
year the log is bound in blue cloth and carried up to the library, where anyone may read it.
"""
MAX_TOKENS = 128


def main() -> int:
    """Run the demo and return its exit code: 1 if the texts differ."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    if model in MODELS:
        pull(model)
    engine = slipstream.load(model)
    messages = [{"role": "user", "content": PROMPT}]
    prompt = messages if engine.has_chat_template else PROMPT
    engine.generate([prompt], slipstream.SamplingParams(max_tokens=8))  # warm caches

    replies: dict[str, list[slipstream.Reply]] = {"classic": [], "speculative": []}
    for arm in ("classic", "speculative", "speculative", "classic"):
        k = "off" if arm == "classic" else None
        params = slipstream.SamplingParams(max_tokens=MAX_TOKENS, k=k)
        replies[arm] += engine.generate([prompt], params)
    engine.close()  # what it measured is kept for the next time
    print(replies["speculative"][0].text, end="\n\n")

    texts = {tuple(reply.token_ids) for arm in replies.values() for reply in arm}
    classic, speculative = _tokens_per_s(replies["classic"]), _tokens_per_s(replies["speculative"])
    report = replies["speculative"][-1].speculation
    length = report.acceptance_length
    print(
        f"classic {classic:.1f} tok/s, speculative {speculative:.1f} tok/s: "
        f"{speculative / classic:.2f}x, a {'gain' if speculative > classic else 'loss'}; "
        f"acceptance length {'-' if length is None else format(length, '.2f')}; "
        f"{'same text' if len(texts) == 1 else 'TEXTS DIFFER'}; {report.reason}"
    )
    return 0 if len(texts) == 1 else 1


def _tokens_per_s(replies: list[slipstream.Reply]) -> float:
    """Return decoded tokens by decode seconds over all runs; prefill's token is not decoded."""
    tokens = sum(reply.usage.completion_tokens - 1 for reply in replies)
    return tokens / sum(reply.timing.decode_s for reply in replies)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except slipstream.SlipstreamError as error:
        sys.exit(f"error: {error}")
