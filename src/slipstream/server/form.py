"""How chunks are written: as server-sent events, or folded into one JSON object.

Both are made from the same chunks. Most events differ in nothing but their text, so what stands
around it is written once a reply, and a round costs one encoded string.

Usage and statistics are those of the engine's replies: `usage` sums over the choices, and
`slipstream` says of each how it came about.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from slipstream.drafters.prediction import PredictionDrafter
from slipstream.server.ask import Ask
from slipstream.server.spelling import Speller
from slipstream.types import Chunk, Reply

PREDICTION = PredictionDrafter.name
DONE = b"data: [DONE]\n\n"
_text_json = json.encoder.encode_basestring_ascii  # str to a JSON string, in C


class Form(ABC):
    """Writes the chunks of one HTTP request.

    Args:
        model: what the reply calls the model.
    """

    prefix: str
    whole_object: str
    event_object: str

    def __init__(self, ask: Ask, speller: Speller, model: str) -> None:
        self._ask = ask
        self._speller = speller
        self._model = model
        self._id = f"{self.prefix}{os.urandom(12).hex()}"
        self._created = int(time.time())
        self._replies: dict[int, Reply] = {}
        self._cached: dict[int, int] = {}  # cached prompt tokens of each prompt
        self._offsets: dict[int, int] = {}  # of the next token, of each choice
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def events(self, arrived: Iterable[tuple[int, Chunk]]) -> bytes:
        """Return the events of chunks, each with its prompt's number."""
        out = []
        for prompt, chunk in arrived:
            index = prompt * self._ask.params.n + chunk.choice
            if index not in self._around:
                self._cached[prompt] = chunk.cached_tokens
                self._around[index] = self._split(index)
                if (first := self._opening()) is not None:
                    out.append(self._event(index, first, None))
            if chunk.logprobs is not None and chunk.token_ids:
                delta = self._delta(chunk.text) | {"logprobs": self._logprobs(index, chunk)}
                out.append(self._event(index, delta, None))
            elif chunk.text:
                before, after = self._around[index]
                out.append(before + _text_json(chunk.text).encode() + after)
            if chunk.reply is not None:
                self._replies[index] = chunk.reply
                out.append(self._event(index, self._closing(), chunk.reply))
        return b"".join(out)

    def end(self) -> bytes:
        """Return what closes a stream: token counts if they were asked for, and the mark."""
        if not self._ask.wants_usage:
            return DONE
        head = self._head(self.event_object)
        return _data(head | {"choices": [], "usage": self._usage()}) + DONE

    def whole(self, arrived: Iterable[tuple[int, Chunk]]) -> bytes:
        """Return the reply that chunks fold into; all choices must have ended."""
        texts: dict[int, list[str]] = {}
        details: dict[int, list[Any]] = {}
        for prompt, chunk in arrived:
            index = prompt * self._ask.params.n + chunk.choice
            if index not in texts:
                self._cached[prompt] = chunk.cached_tokens
            texts.setdefault(index, []).append(chunk.text)
            if chunk.logprobs is not None and chunk.token_ids:
                details.setdefault(index, []).append(self._logprobs(index, chunk))
            if chunk.reply is not None:
                self._replies[index] = chunk.reply
        choices = [
            {
                "index": index,
                **self._message("".join(texts[index])),
                "logprobs": self._joined(details[index]) if index in details else None,
                "finish_reason": reply.finish_reason,
            }
            for index, reply in sorted(self._replies.items())
        ]
        head = self._head(self.whole_object)
        value = head | {"choices": choices, "usage": self._usage()}
        return json.dumps(value | {"slipstream": self._statistics(self._replies)}).encode()

    @abstractmethod
    def _opening(self) -> dict[str, Any] | None:
        """Return what the first event of a choice says of it, None if there is none."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """Return how an event's choice says a text."""

    @abstractmethod
    def _closing(self) -> dict[str, Any]:
        """Return how an event's choice says that nothing is added."""

    @abstractmethod
    def _message(self, text: str) -> dict[str, Any]:
        """Return how a whole reply's choice says its text."""

    @abstractmethod
    def _logprobs(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """Return a chunk's log-probabilities."""

    def _joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Fold log-probabilities of chunks: their lists are put together."""
        joined: dict[str, Any] = {}
        for part in parts:
            for key, value in part.items():
                joined[key] = joined[key] + value if key in joined and value else value
        return joined

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _event(self, index: int, delta: dict[str, Any], reply: Reply | None) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None} | delta
        value = self._head(self.event_object) | {"choices": [choice]}
        if reply is not None:
            choice["finish_reason"] = reply.finish_reason
            value["slipstream"] = self._statistics({index: reply})
        if self._ask.wants_usage:
            value["usage"] = None
        return _data(value)

    def _split(self, index: int) -> tuple[bytes, bytes]:
        """Return an event's bytes before and after its text."""
        mark = "\0"
        before, _, after = self._event(index, self._delta(mark), None).partition(
            _text_json(mark).encode()
        )
        return before, after

    def _usage(self) -> dict[str, Any]:
        n = self._ask.params.n
        replies = self._replies.values()
        prompt = sum(r.usage.prompt_tokens for i, r in self._replies.items() if i % n == 0)
        completion = sum(reply.usage.completion_tokens for reply in replies)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        if self._ask.params.prediction is not None:
            sources = [r.speculation.sources.get(PREDICTION, {}) for r in replies]
            drafted, accepted = (
                sum(counts.get(what, 0) for counts in sources) for what in ("drafted", "accepted")
            )
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return usage

    def _statistics(self, replies: dict[int, Reply]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "seed": reply.seed,
                "timing": asdict(reply.timing),
                "speculation": asdict(reply.speculation),
            }
            for index, reply in sorted(replies.items())
        ]
        return {"choices": choices, "ignored_fields": list(self._ask.ignored)}


class ChatForm(Form):
    """Chat completions."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def _opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _closing(self) -> dict[str, Any]:
        return {"delta": {}}

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, index: int, chunk: Chunk) -> dict[str, Any]:
        entries = self._speller.chat(chunk.token_ids, chunk.logprobs or [])
        return {"content": entries, "refusal": None}


class CompletionForm(Form):
    """Text completions."""

    prefix = "cmpl-"
    whole_object = event_object = "text_completion"

    def _opening(self) -> None:
        return None

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _closing(self) -> dict[str, Any]:
        return {"text": ""}

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, index: int, chunk: Chunk) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        value, offset = self._speller.completion(chunk.token_ids, chunk.logprobs or [], offset)
        self._offsets[index] = offset
        return value


def error_event(body: bytes) -> bytes:
    """Return an error as the last event before the mark; `body` is its JSON."""
    return b"data: " + body + b"\n\n"


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
