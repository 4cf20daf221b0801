"""The llama.cpp side of a benchmark, through the low-level API of llama-cpp-python.

Runs in whatever interpreter has that package. Everything that llama-cpp-python's Python layer
would add is left out: tokens go straight to `llama_decode`, the greedy choice is one vectorised
argmax over the logits where they lie, and rolling back is `llama_memory_seq_rm`. A step is timed
without that argmax where only its logits are asked for, which favours llama.cpp a little.

A *variant* is a list `[flash attention 0 or 1, ubatch]`; each has a context of its own, made on
first use. Threads are set before every measurement.
"""

from __future__ import annotations

import ctypes
from typing import Any

from worker import memory, serve, timed

N_BATCH = 512  # the longest prompt measured goes in as one batch


class LlamaSide:
    """llama.cpp with one model file."""

    def __init__(self) -> None:
        import llama_cpp
        import numpy as np

        self.api: Any = llama_cpp.llama_cpp
        self.version = llama_cpp.__version__
        self.np = np
        self.contexts: dict[tuple[int, int], Any] = {}
        self.filled: dict[tuple[int, int], list[int]] = {}
        log = self.api.llama_log_callback(lambda level, text, data: None)
        self.api.llama_log_set(log, ctypes.c_void_p(0))
        self._log = log  # the callback must outlive the library's use of it
        self.api.llama_backend_init()

    def describe(self) -> dict[str, Any]:
        """Return the package's version, the instruction sets built in, and memory after imports."""
        info = self.api.llama_print_system_info().decode()
        return {"llama_cpp_python": self.version, "system_info": info, **memory()}

    def quantize(self, source: str, target: str) -> dict[str, Any]:
        """Write `target`, the Q4_0 requantisation of `source`, every other choice llama.cpp's."""
        params = self.api.llama_model_quantize_default_params()
        params.ftype = self.api.LLAMA_FTYPE_MOSTLY_Q4_0
        params.allow_requantize = True
        params.nthread = 2
        code = self.api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
        if code:
            raise RuntimeError(f"llama_model_quantize returned {code}")
        return {}

    def load(self, path: str) -> dict[str, Any]:
        """Load a model file and make the default context, ready for a first token."""
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = self.api.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.vocab = self.api.llama_model_get_vocab(self.model)
        self.vocab_size = self.api.llama_vocab_n_tokens(self.vocab)
        self._context((1, N_BATCH))
        return {"weight_bytes": self.api.llama_model_size(self.model)}

    def memory(self) -> dict[str, Any]:
        """Return resident bytes now and at the peak."""
        return memory()

    def tokenize(self, text: str) -> dict[str, Any]:
        """Return the token ids of `text`, no special tokens added."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self.api.llama_tokenize(self.vocab, data, len(data), ids, len(ids), False, False)
        return {"token_ids": list(ids[:count])}

    def prefill(
        self, token_ids: list[int], threads: int, variant: tuple[int, int]
    ) -> dict[str, Any]:
        """Time a prompt from an empty context to its last token's logits."""
        context = self._context(variant, threads)
        self._rewind(context, 0)
        self.filled.pop(tuple(variant), None)
        self._put(context, token_ids, 0, last_only=True)
        return {"seconds": [timed(lambda: self._run(context, 1))]}

    def step(
        self,
        prefix: list[int],
        token_ids: list[int],
        threads: int,
        variant: tuple[int, int],
        repeat: int,
    ) -> dict[str, Any]:
        """Time a decode of `token_ids` after `prefix`, logits of all of them, `repeat` times."""
        context = self._context(variant, threads)
        self._fill(context, variant, prefix)
        seconds = []
        for _ in range(repeat):
            self._put(context, token_ids, len(prefix))
            seconds.append(timed(lambda: self._run(context, len(token_ids))))
            self._rewind(context, len(prefix))
        return {"seconds": seconds}

    def generate(
        self, prompt: list[int], num_tokens: int, threads: int, variant: tuple[int, int]
    ) -> dict[str, Any]:
        """Prefill and emit `num_tokens` greedy tokens, the first of them prefill's own."""
        context = self._context(variant, threads)
        self._rewind(context, 0)
        self.filled.pop(tuple(variant), None)
        token = int(self._decode(context, prompt, 0, last_only=True)[0].argmax())
        emitted = [token]
        for position in range(len(prompt), len(prompt) + num_tokens - 1):
            token = int(self._decode(context, [token], position)[0].argmax())
            emitted.append(token)
        return {"token_ids": emitted}

    def logits(self, token_ids: list[int], path: str) -> dict[str, Any]:
        """Save the float32 logits of every token of a fresh window, shape (R, V), to `path`."""
        context = self._context((1, N_BATCH), 2)
        self._rewind(context, 0)
        self.filled.clear()
        self.np.save(path, self._decode(context, token_ids, 0))
        return {}

    def _context(self, variant: tuple[int, int], threads: int = 2) -> Any:
        flash, ubatch = variant
        if (flash, ubatch) not in self.contexts:
            params = self.api.llama_context_default_params()
            params.n_ctx = 1024
            params.n_batch = N_BATCH
            params.n_ubatch = ubatch
            params.n_seq_max = 1
            params.flash_attn_type = flash
            params.no_perf = True
            context = self.api.llama_init_from_model(self.model, params)
            if not context:
                raise RuntimeError("llama.cpp could not make a context")
            batch = self.api.llama_batch_init(N_BATCH, 0, 1)
            memory = self.api.llama_get_memory(context)
            self.contexts[flash, ubatch] = (context, memory, batch)
        context = self.contexts[flash, ubatch]
        self.api.llama_set_n_threads(context[0], threads, threads)
        return context

    def _rewind(self, context: Any, length: int) -> None:
        self.api.llama_memory_seq_rm(context[1], 0, length, -1)

    def _fill(self, context: Any, variant: tuple[int, int], prefix: list[int]) -> None:
        if self.filled.get(tuple(variant)) != prefix:
            self._rewind(context, 0)
            self._decode(context, prefix, 0, last_only=True)
            self.filled[tuple(variant)] = prefix

    def _decode(
        self, context: Any, token_ids: list[int], position: int, last_only: bool = False
    ) -> Any:
        """Decode one batch; return the wanted logits, a view of shape (rows wanted, V)."""
        self._put(context, token_ids, position, last_only)
        return self._run(context, 1 if last_only else len(token_ids))

    def _put(
        self, context: Any, token_ids: list[int], position: int, last_only: bool = False
    ) -> None:
        batch = context[2]
        batch.n_tokens = len(token_ids)
        for row, token in enumerate(token_ids):
            batch.token[row] = token
            batch.pos[row] = position + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = not last_only or row == len(token_ids) - 1

    def _run(self, context: Any, wanted: int) -> Any:
        code = self.api.llama_decode(context[0], context[2])
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        pointer = self.api.llama_get_logits(context[0])  # waits for the result
        return self.np.ctypeslib.as_array(pointer, shape=(wanted, self.vocab_size))


if __name__ == "__main__":
    serve(LlamaSide)
