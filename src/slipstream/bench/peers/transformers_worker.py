"""transformers as a peer: `generate`, plain or with its own prompt lookup.

The weights are the same GGUF file's, dequantised by transformers as it loads them, in float32 or
bfloat16. PyTorch runs eagerly, which is what `generate` does by default. Nothing is fetched: the
caller sets `HF_HUB_OFFLINE`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from slipstream.bench.peers.worker import FIRST_TOKEN, Emit, cut_at_stop, memory, serve


class TransformersWorker:
    """transformers with one model file, in each dtype that was asked for."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._torch: Any = importlib.import_module("torch")
        self._transformers: Any = importlib.import_module("transformers")
        for needed in ("gguf", "accelerate"):  # what transformers reads the file with
            importlib.import_module(needed)
        self._models: dict[str, Any] = {}

        class FirstToken(self._transformers.generation.streamers.BaseStreamer):  # type: ignore[misc, name-defined]
            """Sees the prompt pass, then the first token."""

            num_seen = 0

            def put(self, value: Any) -> None:
                self.num_seen += 1
                if self.num_seen == 2:
                    emit(FIRST_TOKEN)

            def end(self) -> None:
                pass

        self._streamer = FirstToken

    def describe(self) -> dict[str, Any]:
        """Return the versions, and memory after imports."""
        versions = {
            "transformers": self._transformers.__version__,
            "torch": self._torch.__version__,
        }
        return {**versions, **memory()}

    def load(self, path: str) -> dict[str, Any]:
        """Remember the model file and check that it loads."""
        self._path = Path(path)
        self.prepare(dtype="float32")
        return {"model": self._models["float32"].config.model_type}

    def prepare(self, dtype: str, **others: Any) -> dict[str, Any]:
        """Load what a reply with these options needs, so that its clock does not see it."""
        if dtype not in self._models:
            model = self._transformers.AutoModelForCausalLM.from_pretrained(
                str(self._path.parent),
                gguf_file=self._path.name,
                dtype=getattr(self._torch, dtype),
                local_files_only=True,
            )
            # What the file says about sampling and stops must not mix with what is asked here.
            model.generation_config = self._transformers.GenerationConfig()
            self._models[dtype] = model.eval()
        return {}

    def keep(self, options: list[dict[str, Any]]) -> dict[str, Any]:
        """Drop the models that none of these options needs."""
        wanted = {option["dtype"] for option in options}
        self._models = {k: model for k, model in self._models.items() if k in wanted}
        return {}

    def reply(
        self,
        token_ids: list[int],
        max_tokens: int,
        stop_ids: list[int],
        threads: int,
        dtype: str = "float32",
        lookup: int = 0,
    ) -> dict[str, Any]:
        """Answer a prompt greedily, `lookup` tokens proposed a round (0: plain)."""
        torch = self._torch
        torch.set_num_threads(threads)
        prompt = torch.tensor([token_ids])
        settings: dict[str, Any] = {"prompt_lookup_num_tokens": lookup} if lookup else {}
        config = self._transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=stop_ids or None,
            pad_token_id=0,
            **settings,
        )
        with torch.inference_mode():
            output = self._models[dtype].generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                streamer=self._streamer(),
            )
        ids = output[0, len(token_ids) :].tolist()
        return {"token_ids": cut_at_stop(ids, max_tokens, stop_ids)}


if __name__ == "__main__":
    serve(TransformersWorker)
