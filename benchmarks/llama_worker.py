"""The llama.cpp side of a benchmark: the peer of `slipstream bench`, with steps timed one by one.

A step is timed without the argmax over its logits where only these are asked for, which favours
llama.cpp a little. A *variant* is a list `[flash attention 0 or 1, ubatch]`; each has a context of
its own, made on first use. Threads are set before every measurement.
"""

from __future__ import annotations

import ctypes
from typing import Any

from slipstream.bench.peers.llama_context import N_BATCH, LlamaContext
from slipstream.bench.peers.llama_worker import LlamaWorker, Variant
from slipstream.bench.peers.worker import Emit, memory, serve, timed


class LlamaSide(LlamaWorker):
    """llama.cpp with one model file."""

    def __init__(self, emit: Emit) -> None:
        super().__init__(emit)
        self.filled: dict[Variant, list[int]] = {}

    def memory(self) -> dict[str, Any]:
        """Return resident bytes now and at the peak."""
        return memory()

    def tokenize(self, text: str) -> dict[str, Any]:
        """Return the token ids of `text`, no special tokens added."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self.model.api.llama_tokenize(
            self.model.vocab, data, len(data), ids, len(ids), False, False
        )
        return {"token_ids": list(ids[:count])}

    def prefill(self, token_ids: list[int], threads: int, variant: Variant) -> dict[str, Any]:
        """Time a prompt of one batch from an empty context to its last token's logits."""
        context = self._empty(variant, threads)
        context.put(token_ids, 0, last_only=True)
        return {"seconds": [timed(lambda: context.run(1))]}

    def step(
        self,
        prefix: list[int],
        token_ids: list[int],
        threads: int,
        variant: Variant,
        repeat: int,
    ) -> dict[str, Any]:
        """Time a decode of `token_ids` after `prefix`, logits of all of them, `repeat` times."""
        context = self.context(variant, threads)
        if self.filled.get(tuple(variant)) != prefix:
            context.prefill(prefix)
            self.filled[tuple(variant)] = prefix
        seconds = []
        for _ in range(repeat):
            context.put(token_ids, len(prefix))
            seconds.append(timed(lambda: context.run(len(token_ids))))
            context.rewind(len(prefix))
        return {"seconds": seconds}

    def generate(
        self, prompt: list[int], num_tokens: int, threads: int, variant: Variant
    ) -> dict[str, Any]:
        """Prefill and emit `num_tokens` greedy tokens, the first of them prefill's own."""
        context = self._empty(variant, threads)
        first = int(context.prefill(prompt)[0].argmax())
        return {"token_ids": self.plain(context, prompt, first, num_tokens, frozenset())}

    def logits(self, token_ids: list[int], path: str) -> dict[str, Any]:
        """Save the float32 logits of every token of a fresh window, shape (R, V), to `path`."""
        context = self._empty((1, N_BATCH), 2)
        self.model.np.save(path, context.decode(token_ids, 0))
        return {}

    def _empty(self, variant: Variant, threads: int) -> LlamaContext:
        context = self.context(variant, threads)
        context.rewind(0)
        self.filled.pop(tuple(variant), None)
        return context


if __name__ == "__main__":
    serve(LlamaSide)
