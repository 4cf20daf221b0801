"""llama.cpp as a peer: plain greedy decoding, or with its own prompt-lookup speculation.

Run in whatever interpreter has llama-cpp-python. The proposals are that package's own
(`LlamaPromptLookupDecoding`); the loop around them is this module's, since the one of its `Llama`
class copies the logits of every prompt token and runs a chain of samplers for every choice. Here a
choice is one vectorised argmax. Proposals are verified in one decode, and what the model disagrees
with is rewound.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

from slipstream.bench.peers.llama_context import N_BATCH, LlamaContext, LlamaModel
from slipstream.bench.peers.worker import FIRST_TOKEN, Emit, cut_at_stop, memory, serve

Stops = frozenset[int]
Variant = tuple[int, int]  # flash attention 0 or 1, ubatch


class LlamaWorker:
    """llama.cpp with one model file."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.model = LlamaModel()
        self.contexts: dict[Variant, LlamaContext] = {}

    def describe(self) -> dict[str, Any]:
        """Return the package's version, the instruction sets built in, and memory after imports."""
        info = self.model.api.llama_print_system_info().decode()
        return {"llama_cpp_python": self.model.version, "system_info": info, **memory()}

    def quantize(self, source: str, target: str, threads: int = 2) -> dict[str, Any]:
        """Write `target`, the Q4_0 requantisation of `source`."""
        self.model.quantize(source, target, threads)
        return {}

    def load(self, path: str) -> dict[str, Any]:
        """Load a model file and make the default context, ready for a first token."""
        self.model.load(path)
        self.context((1, N_BATCH))
        return {
            "weight_bytes": self.model.api.llama_model_size(self.model.handle),
            "model": self.model.description(),
            "is_q4_0": self.model.is_q4_0(),
        }

    def prepare(self, length: int, threads: int, flash: int = 1, lookup: int = 0) -> dict[str, Any]:
        """Make the context that a reply of `length` tokens with these options needs."""
        self.context((flash, N_BATCH), threads, length + lookup)
        return {}

    def keep(self, options: list[dict[str, Any]]) -> dict[str, Any]:
        """Free the contexts that none of these options needs."""
        wanted = {(option["flash"], N_BATCH) for option in options}
        for variant in self.contexts.keys() - wanted:
            self.contexts.pop(variant).free()
        return {}

    def reply(
        self,
        token_ids: list[int],
        max_tokens: int,
        stop_ids: list[int],
        threads: int,
        flash: int = 1,
        lookup: int = 0,
    ) -> dict[str, Any]:
        """Answer a prompt greedily, `lookup` tokens proposed a round (0: plain)."""
        length = len(token_ids) + max_tokens + lookup
        context = self.context((flash, N_BATCH), threads, length)
        first = int(context.prefill(token_ids)[0].argmax())
        self.emit(FIRST_TOKEN)
        stops = frozenset(stop_ids)
        if lookup:
            ids = self.looked_up(context, token_ids, first, max_tokens, stops, lookup)
        else:
            ids = self.plain(context, token_ids, first, max_tokens, stops)
        return {"token_ids": cut_at_stop(ids, max_tokens, stop_ids)}

    def context(self, variant: Variant, threads: int = 2, length: int = 1) -> LlamaContext:
        """Return the context of a variant, made or made anew if it must hold more tokens."""
        flash, ubatch = variant
        old = self.contexts.get((flash, ubatch))
        if old is None or old.length < length:
            if old is not None:
                self.contexts.pop((flash, ubatch)).free()
            self.contexts[flash, ubatch] = LlamaContext(self.model, flash, ubatch, length)
        context = self.contexts[flash, ubatch]
        context.set_threads(threads)
        return context

    def plain(
        self, context: LlamaContext, prompt: list[int], token: int, max_tokens: int, stops: Stops
    ) -> list[int]:
        """Return the reply that begins with `token`, the choice after a prefilled prompt."""
        emitted = [token]
        while token not in stops and len(emitted) < max_tokens:
            position = len(prompt) + len(emitted) - 1
            token = int(context.decode([token], position)[0].argmax())
            emitted.append(token)
        return emitted

    def looked_up(
        self,
        context: LlamaContext,
        prompt: list[int],
        token: int,
        max_tokens: int,
        stops: Stops,
        lookup: int,
    ) -> list[int]:
        """Return the same reply, or with what its last round made beyond its end."""
        speculative = importlib.import_module("llama_cpp.llama_speculative")
        propose = speculative.LlamaPromptLookupDecoding(num_pred_tokens=lookup)
        text = self.model.np.empty(len(prompt) + max_tokens + lookup, self.model.np.intc)
        text[: len(prompt)] = prompt
        new, length = [token], len(prompt)
        while True:
            text[length : length + len(new)] = new
            length += len(new)
            if not stops.isdisjoint(new) or length >= len(prompt) + max_tokens:
                return [int(token) for token in text[len(prompt) : length]]
            context.rewind(length - 1)  # keeps what was accepted, without the newest token
            drafts = propose(text[:length]).tolist()
            rows = context.decode([new[-1], *drafts], length - 1)
            choices = rows.argmax(axis=1).tolist()
            agreed = (draft == choice for draft, choice in zip(drafts, choices, strict=False))
            accepted = sum(1 for _ in itertools.takewhile(bool, agreed))
            new = choices[: accepted + 1]


if __name__ == "__main__":
    serve(LlamaWorker)
