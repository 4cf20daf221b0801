"""Our side of a benchmark.

Two layers are timed: a whole step (the compiled forward over prepared rows, argmax included) and
the engine as a caller has it, with speculation off. Threads are fixed when a back end is made, so
a worker serves one thread count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.bench.peers.worker import memory, serve, timed

MAX_LOGITS = 16  # logit rows of one step that the engine compiles for
NUM_PAGES = 64  # enough for the longest context measured; the idle engine has all of its pages free


class SlipstreamSide:
    """Slipstream with one model file."""

    def __init__(self) -> None:
        import slipstream
        import slipstream.engine.engine
        import slipstream.engine.load
        import slipstream.kernels.cpu
        import slipstream.models.loading

        self.slipstream = slipstream

    def describe(self) -> dict[str, Any]:
        """Return the version, and memory after imports."""
        return {"slipstream": self.slipstream.__version__, **memory()}

    def load(self, path: str, threads: int = 0, device: str = "cpu") -> dict[str, Any]:
        """Load the engine, speculation off, ready for a first token."""
        config = self.slipstream.EngineConfig(
            k="off", drafter="none", threads=threads, device=device
        )
        self.engine = self.slipstream.load(path, config)
        target = self.engine.target
        if target.backend.name != device:
            raise RuntimeError(f"{target.backend.name} serves instead of {device}")
        self.run, arch = target.step, target.arch
        self.chunk = config.prefill_chunk
        self.vocab_size = arch.vocab_size
        self.pages = np.arange(NUM_PAGES, dtype=np.int32)[None]
        self.filled: list[int] = []
        return {
            "weight_bytes": target.backend.weight_bytes(),
            "kv_bytes_a_position": 2 * arch.kv_width,  # pages hold 16-bit K and V
            "backend": target.backend.name,
            "reason": target.backend.reason,
        }

    def memory(self) -> dict[str, Any]:
        """Return resident bytes now and at the peak."""
        return memory()

    def tokenize(self, text: str) -> dict[str, Any]:
        """Return the token ids of `text`, no special tokens added."""
        return {"token_ids": self.engine.tokenizer.encode(text, parse_special=False)}

    def prefill(self, token_ids: list[int]) -> dict[str, Any]:
        """Time a prompt, in chunks, from an empty context to its last token's logits."""
        chunks = self._chunks(token_ids)
        self.filled = []
        return {"seconds": [timed(lambda: [self.run(rows) for rows in chunks])]}

    def step(self, prefix: list[int], token_ids: list[int], repeat: int) -> dict[str, Any]:
        """Time a step over `token_ids` after `prefix`, logits and argmax of all, `repeat` times."""
        if self.filled != prefix:
            for rows in self._chunks(prefix):
                self.run(rows)
            self.filled = prefix
        rows = self._rows(token_ids, len(prefix), range(len(token_ids)))
        seconds = [timed(lambda: self.run(rows)) for _ in range(repeat)]
        return {"seconds": seconds, "argmax": self.run(rows).argmax.tolist()}

    def generate(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """Have the engine emit `num_tokens` greedy tokens, the first of them prefill's own."""
        self.filled = []  # the engine takes pages of its own choice
        params = self.slipstream.SamplingParams(max_tokens=num_tokens, ignore_eos=True, k="off")
        (reply,) = self.engine.generate([prompt], params)
        return {"token_ids": reply.token_ids}

    def logits(self, token_ids: list[int], path: str) -> dict[str, Any]:
        """Save the float32 logits of every token of a fresh window, shape (R, V), to `path`."""
        self.filled = []
        saved = np.empty((len(token_ids), self.vocab_size), np.float32)
        for start in range(0, len(token_ids), MAX_LOGITS):
            chunk = token_ids[start : start + MAX_LOGITS]
            result = self.run(self._rows(chunk, start, range(len(chunk))))
            saved[start : start + len(chunk)] = result.logits
        np.save(path, saved)
        return {}

    def _chunks(self, token_ids: list[int]) -> list[Any]:
        """Return the rows of a prompt; only the very last one's logits are wanted."""
        chunks = []
        for start in range(0, len(token_ids), self.chunk):
            chunk = token_ids[start : start + self.chunk]
            is_last = start + len(chunk) == len(token_ids)
            chunks.append(self._rows(chunk, start, [len(chunk) - 1] if is_last else []))
        return chunks

    def _rows(self, token_ids: list[int], position: int, wanted: Sequence[int]) -> Any:
        from slipstream.kernels.ops import Rows

        count = len(token_ids)
        return Rows(
            token_ids=np.array(token_ids, np.int32),
            positions=np.arange(position, position + count, dtype=np.int32),
            sequences=np.zeros(count, np.int32),
            page_table=self.pages,
            logit_rows=np.array(wanted, np.int32),
        )


if __name__ == "__main__":
    serve(lambda emit: SlipstreamSide())
