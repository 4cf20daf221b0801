"""OpenVINO GenAI as a peer: its `LLMPipeline`, plain or with its own prompt lookup.

It reads the same GGUF file, as far as it knows the file's formats. Threads and speculation are
fixed when a pipeline is compiled, so each pair of them is a pipeline of its own. The cache of
prompts that were seen before is off.
"""

from __future__ import annotations

import importlib
from typing import Any

from slipstream.bench.peers.worker import FIRST_TOKEN, Emit, cut_at_stop, memory, serve

NGRAM = 2  # longest n-gram looked up: what llama.cpp's and transformers' lookups do by default
Key = tuple[int, bool]  # threads, whether prompts are looked up


class OpenVinoWorker:
    """OpenVINO GenAI with one model file."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._np: Any = importlib.import_module("numpy")
        self._pipelines: dict[Key, Any] = {}
        status = self._genai.StreamingStatus.RUNNING

        class FirstToken(self._genai.StreamerBase):  # type: ignore[misc, name-defined]
            """Sees token ids as they come: one, or what a round of speculation made."""

            is_first = True

            def write(self, token_ids: Any) -> Any:
                if self.is_first:
                    emit(FIRST_TOKEN)
                    self.is_first = False
                return status

            def end(self) -> None:
                pass

        self._streamer = FirstToken

    def describe(self) -> dict[str, Any]:
        """Return the version, and memory after imports."""
        return {"openvino_genai": self._genai.__version__, **memory()}

    def load(self, path: str) -> dict[str, Any]:
        """Remember the model file and check that it loads."""
        self._path = path
        self.prepare(threads=1)
        return {}

    def prepare(self, threads: int, lookup: int = 0, **others: Any) -> dict[str, Any]:
        """Compile what a reply with these options needs, so that its clock does not see it."""
        key = (threads, lookup > 0)
        if key not in self._pipelines:
            settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
            scheduler = self._genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            settings["scheduler_config"] = scheduler
            if lookup:
                settings["prompt_lookup"] = True
            self._pipelines[key] = self._genai.LLMPipeline(self._path, "CPU", **settings)
        return {}

    def keep(self, options: list[dict[str, Any]]) -> dict[str, Any]:
        """Drop the pipelines that none of these options needs."""
        wanted = {(option["threads"], option.get("lookup", 0) > 0) for option in options}
        self._pipelines = {k: v for k, v in self._pipelines.items() if k in wanted}
        return {}

    def reply(
        self,
        token_ids: list[int],
        max_tokens: int,
        stop_ids: list[int],
        threads: int,
        lookup: int = 0,
    ) -> dict[str, Any]:
        """Answer a prompt greedily, `lookup` tokens proposed a round (0: plain)."""
        config = self._genai.GenerationConfig()
        config.do_sample = False
        config.max_new_tokens = max_tokens
        config.stop_token_ids = set(stop_ids)
        config.ignore_eos = not stop_ids
        if lookup:
            config.num_assistant_tokens = lookup
            config.max_ngram_size = NGRAM
        prompt = self._np.array([token_ids], self._np.int64)
        inputs = self._genai.TokenizedInputs(
            self._openvino.Tensor(prompt), self._openvino.Tensor(self._np.ones_like(prompt))
        )
        result = self._pipelines[threads, lookup > 0].generate(inputs, config, self._streamer())
        return {"token_ids": cut_at_stop(result.tokens[0], max_tokens, stop_ids)}


if __name__ == "__main__":
    serve(OpenVinoWorker)
