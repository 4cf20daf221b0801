"""What serving costs: a stream against `generate`, eight clients against one, and the first token.

    python benchmarks/serving.py [--model smollm2-135m] [--groups 3] [--json FILE]

Bars, on two cores with SmolLM2-135M: a token of a stream comes at most 15 % later than one of
`generate`; eight clients together get at least 2.5 times the tokens of one; the 95th percentile of
the time to the first token, at eight clients with prompts of 64 tokens, is at most 1.5 s.

The server is a process of its own. Its clients are raw sockets in this one, read by one thread, so
they take from the same cores as little as a client can. `generate` runs in this process as well,
in turns with the streams, and both count (tokens - 1) / (last token - first token); replies are
compared. What is asked are the built-in workload's conversations with prompts of at most 130
tokens, eight of a group, first one after the other and then at once; `generate` gets the same
eight, one by one and together, so that what eight gain is seen with and without a server around
the engine. Settings take turns within every group, since a shared machine changes its speed by the
minute. Nothing is cached from one to the next: prefix cache and profile are off. Prompts of 64
tokens are pieces of one text, all different.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import DEFAULT_MODEL, find_model, provenance, sample_text

from slipstream import SamplingParams, load
from slipstream.bench.workload import open_workload

CLIENTS = 8
PROMPT, TOKENS = 64, 128
TTFT_ROUNDS = 6
LONGEST_PROMPT = 130  # of the built-in conversations that take part
SETTINGS = {"profile": "off", "prefix_cache": "off"}
MODES = ("off", "auto")
WAYS = ("generate_one", "one", "generate_eight", "eight")
OVERHEAD_BAR, SCALING_BAR, TTFT_BAR_S = 0.15, 2.5, 1.5

Ask = tuple[str, dict[str, Any]]  # path and body


@dataclass
class Client:
    """One request on a connection of its own, and when its bytes came."""

    sock: socket.socket
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    received: bytearray = field(default_factory=bytearray)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of the stream."""
        lines = self.received.split(b"\n")
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]

    @property
    def text(self) -> str:
        """The text of the chat."""
        choices = [choice for event in self.events for choice in event["choices"]]
        return "".join(choice["delta"].get("content", "") for choice in choices)

    @property
    def num_tokens(self) -> int:
        """The tokens that the server says it made."""
        return int(self.events[-1]["usage"]["completion_tokens"])


@contextmanager
def server(model: str) -> Iterator[tuple[str, int]]:
    """Run a server on a free port and yield its address."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent / "src")}
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", "serve", model, "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("serving "):
                host, port = line.split("http://")[1].strip().split(":")
                yield host, int(port)
                return
        raise SystemExit("the server did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def chat(messages: Sequence[dict[str, str]], mode: str) -> Ask:
    """Return a conversation as a request."""
    body = {"messages": messages, "max_tokens": TOKENS, "speculation": {"mode": mode}}
    return "/v1/chat/completions", body


def ask(address: tuple[str, int], asks: Sequence[Ask]) -> list[Client]:
    """Send streamed requests at once, and read them all to their ends."""
    clients = []
    shared = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    with selectors.DefaultSelector() as selector:
        for path, fields in asks:
            body = json.dumps(shared | fields).encode()
            sock = socket.create_connection(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client = Client(sock, time.perf_counter())
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            selector.register(sock, selectors.EVENT_READ, client)
            clients.append(client)
        left = len(clients)
        while left:
            for key, _ in selector.select():
                client = key.data
                piece = client.sock.recv(1 << 16)
                now = time.perf_counter()
                if not client.first_s:
                    client.first_s = now
                client.received += piece
                if not piece or b"[DONE]" in piece:
                    client.last_s = now
                    selector.unregister(client.sock)
                    client.sock.close()
                    left -= 1
    return clients


@dataclass
class Arm:
    """What one speculation mode took, over all groups.

    Attributes:
        served, alone: seconds a token of a stream and of `generate`, one after the other.
        tokens: of all replies, the same in the four ways to ask.
        seconds: by way to ask.
    """

    mode: str
    served: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WAYS, 0.0))

    def add(self, address: tuple[str, int], engine: Any, group: Sequence[Any]) -> None:
        """Ask for the conversations of a group, in every way."""
        params = SamplingParams(max_tokens=TOKENS, k="off" if self.mode == "off" else None)
        for messages in group:
            began = time.perf_counter()
            (reply,) = engine.generate([messages], params)
            self.seconds["generate_one"] += time.perf_counter() - began
            (client,) = ask(address, [chat(messages, self.mode)])
            self.seconds["one"] += client.last_s - client.sent_s
            self.tokens += client.num_tokens
            if client.text != reply.text:
                raise SystemExit(
                    f"a stream differs from generate:\n{client.text!r}\n{reply.text!r}"
                )
            if client.num_tokens > TOKENS / 4:  # a short reply is mostly its last event
                self.served.append((client.last_s - client.first_s) / (client.num_tokens - 1))
                self.alone.append(reply.timing.decode_s / (client.num_tokens - 1))
        began = time.perf_counter()
        engine.generate(list(group), params)
        self.seconds["generate_eight"] += time.perf_counter() - began
        clients = ask(address, [chat(messages, self.mode) for messages in group])
        ends, starts = [c.last_s for c in clients], [c.sent_s for c in clients]
        self.seconds["eight"] += max(ends) - min(starts)

    def overhead(self) -> dict[str, float]:
        """Return milliseconds a token, medians over conversations."""
        ratios = [s / a for s, a in zip(self.served, self.alone, strict=True)]
        return {
            "generate_ms": 1e3 * statistics.median(self.alone),
            "stream_ms": 1e3 * statistics.median(self.served),
            "overhead": statistics.median(ratios) - 1,
            "replies": len(ratios),
        }

    def throughput(self) -> dict[str, float]:
        """Return tokens a second, prefill included, and what eight have over one."""
        rates = {f"{way}_tokens_per_s": self.tokens / self.seconds[way] for way in WAYS}
        return rates | {
            "scaling": self.seconds["one"] / self.seconds["eight"],
            "generate_scaling": self.seconds["generate_one"] / self.seconds["generate_eight"],
        }


def first_tokens(address: tuple[str, int], prompts: Sequence[str]) -> dict[str, float]:
    """Return the spread of the time to the first token at eight clients."""
    seconds = []
    for turn in range(TTFT_ROUNDS):
        own = prompts[turn * CLIENTS :][:CLIENTS]
        asks = [("/v1/completions", {"prompt": p, "ignore_eos": True}) for p in own]
        seconds += [c.first_s - c.sent_s for c in ask(address, asks)]
    seconds.sort()
    p95 = seconds[min(len(seconds) - 1, round(0.95 * len(seconds)))]
    return {"p50_s": statistics.median(seconds), "p95_s": p95, "requests": len(seconds)}


def pieces(engine: Any, count: int) -> list[str]:
    """Return texts of about PROMPT tokens each, all different from their first token on."""
    words = sample_text().split()
    found = []
    for index in range(count):
        start = (index * 37) % (len(words) - PROMPT)
        text = f"{index}: " + " ".join(words[start : start + PROMPT])
        ids = engine.tokenizer.encode(text, parse_special=False)[:PROMPT]
        found.append(engine.tokenizer.decode(ids))
    return found


def grouped(engine: Any, count: int) -> list[list[Any]]:
    """Return groups of eight conversations with short prompts, the categories in turn."""

    def is_short(messages: Any) -> bool:
        return engine.check(messages)[0].sequence.prompt_len <= LONGEST_PROMPT

    categories = open_workload("built-in").categories.values()
    firsts = [[c.messages(0, []) for c in some] for some in categories]
    short = [list(filter(is_short, some)) for some in firsts]
    mixed = [messages for turn in itertools.zip_longest(*short) for messages in turn if messages]
    if len(mixed) < count * CLIENTS:
        raise SystemExit(f"--groups must be in [1, {len(mixed) // CLIENTS}], got {count}")
    return [mixed[index * CLIENTS :][:CLIENTS] for index in range(count)]


def main() -> int:
    """Print the bars, the table and one JSON line; return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = find_model(options.model)
    engine = load(str(path), **SETTINGS)
    groups = grouped(engine, options.groups)
    result: dict[str, Any] = {"schema": 2, "overhead": {}, "throughput": {}}
    with server(options.model) as address:
        ask(address, [chat(groups[0][0], "auto")])  # what is done once
        engine.generate([groups[0][0]], SamplingParams(max_tokens=TOKENS))
        arms = [Arm(mode) for mode in MODES]
        for number, group in enumerate(groups):
            for arm in arms if number % 2 == 0 else arms[::-1]:
                arm.add(address, engine, group)
        for arm in arms:
            result["overhead"][arm.mode] = arm.overhead()
            result["throughput"][arm.mode] = arm.throughput()
        prompts = pieces(engine, TTFT_ROUNDS * CLIENTS)
        result["first_token"] = first_tokens(address, prompts)
    print(
        f"bars: a token of a stream <= {OVERHEAD_BAR:.0%} later than generate's, "
        f"{CLIENTS} clients >= {SCALING_BAR} x one, first token p95 <= {TTFT_BAR_S} s\n"
    )
    print(f"{'speculation':>11} {'generate ms':>12} {'stream ms':>10} {'overhead':>9}", end="")
    print(f" {'one tok/s':>10} {'eight tok/s':>12} {'scaling':>8} {'generate':>9}")
    for mode in MODES:
        cost, rate = result["overhead"][mode], result["throughput"][mode]
        print(
            f"{mode:>11} {cost['generate_ms']:>12.3f} {cost['stream_ms']:>10.3f} "
            f"{cost['overhead']:>9.1%} {rate['one_tokens_per_s']:>10.0f} "
            f"{rate['eight_tokens_per_s']:>12.0f} {rate['scaling']:>8.2f} "
            f"{rate['generate_scaling']:>9.2f}"
        )
    first = result["first_token"]
    spread = f"p50 {first['p50_s']:.3f} s, p95 {first['p95_s']:.3f} s"
    print(f"\nfirst token at {CLIENTS} clients: {spread}")
    result["provenance"] = provenance(path)
    line = json.dumps(result)
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    missed = (
        any(cost["overhead"] > OVERHEAD_BAR for cost in result["overhead"].values())
        or any(rate["scaling"] < SCALING_BAR for rate in result["throughput"].values())
        or first["p95_s"] > TTFT_BAR_S
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
