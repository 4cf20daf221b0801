"""Two hundred mixed requests, sixteen at a time: nothing leaks, and each reply is its own."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from slipstream.engine.engine import Engine
from slipstream.types import SamplingParams
from tests.server.process import PATIENCE_S, ServerProcess, eventually

REQUESTS, AT_A_TIME = 200, 16
MAX_GROWTH_BYTES = 24 << 20  # arenas of sixteen threads' worth of requests, not a leak per request
WORDS = ("hello", "world", "it", "12", "naïve", "日本", "\n\n", "tail")
BAD_BODIES = (
    b"{",
    b'{"prompt": 5}',
    b'{"prompt": "a", "n": 0}',
    b"[" * 5000,
    b'{"prompt": "\\ud800"}',
)


@dataclass(frozen=True)
class Plan:
    """A request, and what its client does."""

    number: int
    prompt: Any
    params: dict[str, Any]
    is_chat: bool
    is_streamed: bool
    leaves_after: int | None
    speculation: dict[str, Any]
    bad_body: bytes | None


def plans(seed: int) -> list[Plan]:
    """Draw the requests."""
    rng = random.Random(seed)
    made = []
    for number in range(REQUESTS):
        text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 60)))
        is_chat = rng.random() < 0.5
        params: dict[str, Any] = {
            "max_tokens": rng.randrange(1, 150),
            "temperature": rng.choice((0, 0, 0.7, 1.3)),
            "seed": rng.randrange(1 << 30),
            "n": rng.choice((1, 1, 1, 2, 3)),
        }
        if rng.random() < 0.3:
            params |= {"top_p": 0.9, "repetition_penalty": 1.1, "stop": ["it", "\n"]}
        if rng.random() < 0.2:
            params |= {"ignore_eos": True, "min_tokens": 1}
        made.append(
            Plan(
                number=number,
                prompt=[{"role": "user", "content": text}] if is_chat else text,
                params=params,
                is_chat=is_chat,
                is_streamed=rng.random() < 0.6,
                leaves_after=rng.randrange(3) if rng.random() < 0.2 else None,
                speculation=rng.choice(({}, {"mode": "off"}, {"mode": "fixed", "k": 5})),
                bad_body=rng.choice(BAD_BODIES) if rng.random() < 0.1 else None,
            )
        )
    return made


def carry_out(port: int, plan: Plan) -> list[str] | None:
    """Send a request; return the texts of its choices, None if it was bad or was left."""
    key = "messages" if plan.is_chat else "prompt"
    path = "/v1/chat/completions" if plan.is_chat else "/v1/completions"
    body = {key: plan.prompt, "stream": plan.is_streamed, "speculation": plan.speculation}
    raw = plan.bad_body or json.dumps(body | plan.params).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with closing(connection):
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        if plan.leaves_after == 0:
            return None
        reply = connection.getresponse()
        if plan.bad_body:
            assert reply.status == 400
            assert json.load(reply)["error"]["message"]
            return None
        assert reply.status == 200, reply.read()
        if plan.leaves_after is not None:
            reply.read(plan.leaves_after)
            return None
        content = reply.read()
    return streamed(content, plan) if plan.is_streamed else whole(content)


def whole(content: bytes) -> list[str]:
    """Return the texts of a whole reply."""
    choices = json.loads(content)["choices"]
    return [c["message"]["content"] if "message" in c else c["text"] for c in choices]


def streamed(content: bytes, plan: Plan) -> list[str]:
    """Return the texts of a stream."""
    events = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    texts = [""] * plan.params["n"]
    for event in events[:-1]:
        (choice,) = json.loads(event)["choices"]
        text = choice["delta"].get("content", "") if plan.is_chat else choice["text"]
        texts[choice["index"]] += text
    return texts


def all_at_once(port: int, made: Sequence[Plan]) -> list[list[str] | None]:
    """Carry out all plans, sixteen at a time."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(lambda plan: carry_out(port, plan), made, timeout=PATIENCE_S))


def test_a_soak_leaks_nothing_and_every_reply_is_its_serial_run(
    server: ServerProcess, alone: Engine
) -> None:
    all_at_once(server.port, plans(1))  # threads, arenas and pages that are taken once
    eventually(server.is_idle)
    threads, rss_bytes = server.num_threads(), server.rss_bytes()
    eventually(lambda: server.num_files() == server.num_files())
    made = plans(2)
    answers = all_at_once(server.port, made)
    eventually(server.is_idle)
    assert sum(answer is not None for answer in answers) > REQUESTS / 2
    for plan, answer in zip(made, answers, strict=True):
        if answer is not None:
            serial = alone.generate([plan.prompt], SamplingParams(**plan.params))
            assert answer == [reply.text for reply in serial], plan
    assert server.num_threads() <= threads
    assert server.rss_bytes() - rss_bytes < MAX_GROWTH_BYTES
