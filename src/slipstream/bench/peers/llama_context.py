"""llama.cpp through the low-level API of llama-cpp-python: a model file and its contexts.

Everything that the package's Python layer would add is left out: tokens go straight to
`llama_decode`, logits are looked at where they lie, and rolling back is `llama_memory_seq_rm`.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

N_BATCH = 512  # llama.cpp's own default for a physical batch; a longer prompt takes several
N_CTX_STEP = 1024  # a context is made anew when it must grow, and then by this much


class LlamaModel:
    """llama.cpp with, once loaded, one model file."""

    def __init__(self) -> None:
        package = importlib.import_module("llama_cpp")
        self.api: Any = package.llama_cpp
        self.version: str = package.__version__
        self.np: Any = importlib.import_module("numpy")
        log = self.api.llama_log_callback(lambda level, text, data: None)
        self.api.llama_log_set(log, ctypes.c_void_p(0))
        self._log = log  # the callback must outlive the library's use of it
        self.api.llama_backend_init()

    def quantize(self, source: str, target: str, threads: int) -> None:
        """Write `target`, the Q4_0 requantisation of `source`, every other choice llama.cpp's."""
        params = self.api.llama_model_quantize_default_params()
        params.ftype = self.api.LLAMA_FTYPE_MOSTLY_Q4_0
        params.allow_requantize = True
        params.nthread = threads
        code = self.api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
        if code:
            raise RuntimeError(f"llama_model_quantize returned {code}")

    def load(self, path: str) -> None:
        """Load a model file."""
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = 0
        self.handle = self.api.llama_model_load_from_file(path.encode(), params)
        if not self.handle:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.vocab = self.api.llama_model_get_vocab(self.handle)
        self.vocab_size: int = self.api.llama_vocab_n_tokens(self.vocab)

    def is_q4_0(self) -> bool:
        """Return whether the file says of itself that it is mostly Q4_0."""
        text = ctypes.create_string_buffer(32)
        key = b"general.file_type"
        self.api.llama_model_meta_val_str(self.handle, key, text, len(text))
        return bool(text.value == str(self.api.LLAMA_FTYPE_MOSTLY_Q4_0).encode())

    def description(self) -> str:
        """Return llama.cpp's own words for the file, e.g. "llama 135M Q4_1"."""
        text = ctypes.create_string_buffer(128)
        self.api.llama_model_desc(self.handle, text, len(text))
        return text.value.decode(errors="replace")


class LlamaContext:
    """One sequence's context.

    Args:
        model: a loaded model.
        flash: whether attention is the fused kernel, 0 or 1.
        ubatch: rows of a prompt that are computed together.
        length: tokens that it must hold.
    """

    def __init__(self, model: LlamaModel, flash: int, ubatch: int, length: int) -> None:
        self._api, self._model = model.api, model
        self.length = -(-length // N_CTX_STEP) * N_CTX_STEP
        params = self._api.llama_context_default_params()
        params.n_ctx = self.length
        params.n_batch = N_BATCH
        params.n_ubatch = ubatch
        params.n_seq_max = 1
        params.flash_attn_type = flash
        params.no_perf = True
        self._context = self._api.llama_init_from_model(model.handle, params)
        if not self._context:
            raise RuntimeError("llama.cpp could not make a context")
        self._memory = self._api.llama_get_memory(self._context)
        self._batch = self._api.llama_batch_init(N_BATCH, 0, 1)

    def free(self) -> None:
        """Give the memory back; the context is unusable afterwards."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)

    def set_threads(self, threads: int) -> None:
        """Choose the threads of everything that follows."""
        self._api.llama_set_n_threads(self._context, threads, threads)

    def rewind(self, length: int) -> None:
        """Forget everything from position `length` on."""
        self._api.llama_memory_seq_rm(self._memory, 0, length, -1)

    def prefill(self, token_ids: Sequence[int]) -> Any:
        """Decode a prompt into an empty context; return its last logits, of shape (1, V)."""
        self.rewind(0)
        whole = (len(token_ids) - 1) // N_BATCH * N_BATCH
        for start in range(0, whole, N_BATCH):
            self.decode(token_ids[start : start + N_BATCH], start, last_only=True)
        return self.decode(token_ids[whole:], whole, last_only=True)

    def decode(self, token_ids: Sequence[int], position: int, last_only: bool = False) -> Any:
        """Decode one batch; return the wanted logits, a view of shape (rows wanted, V)."""
        self.put(token_ids, position, last_only)
        return self.run(1 if last_only else len(token_ids))

    def put(self, token_ids: Sequence[int], position: int, last_only: bool = False) -> None:
        """Fill the batch, at most `N_BATCH` tokens, without running it."""
        batch = self._batch
        batch.n_tokens = len(token_ids)
        for row, token in enumerate(token_ids):
            batch.token[row] = token
            batch.pos[row] = position + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = not last_only or row == len(token_ids) - 1

    def run(self, wanted: int) -> Any:
        """Run the batch; return the logits of its `wanted` rows, a view of shape (wanted, V)."""
        code = self._api.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        pointer = self._api.llama_get_logits(self._context)  # waits for the result
        return self._model.np.ctypeslib.as_array(pointer, shape=(wanted, self._model.vocab_size))
