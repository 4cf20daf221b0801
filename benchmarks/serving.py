"""What serving costs: a stream against `generate`, eight clients against one, and the first token.

    python benchmarks/serving.py [--model smollm2-135m] [--trials 5] [--json FILE]

Bars, on two cores with SmolLM2-135M: a token of a stream comes at most 15 % later than one of
`generate`; eight clients together get at least 2.5 times the tokens of one; the 95th percentile of
the time to the first token, at eight clients with prompts of 64 tokens, is at most 1.5 s.

The server is a process of its own. Its clients are raw sockets in this one, read by one thread, so
they take from the same cores as little as a client can. `generate` runs in this process as well,
in turns with the streams, and both count (tokens - 1) / (last token - first token). Prompts are
pieces of one text, all different, and replies are compared with those of `generate`.
"""

from __future__ import annotations

import argparse
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

CLIENTS = 8
PROMPT, TOKENS = 64, 128
TTFT_ROUNDS = 6
OVERHEAD_BAR, SCALING_BAR, TTFT_BAR_S = 0.15, 2.5, 1.5


@dataclass
class Client:
    """One request on a connection of its own, and when its bytes came."""

    sock: socket.socket
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_reads: int = 0
    received: bytearray = field(default_factory=bytearray)

    def text(self) -> str:
        """Return the text of the stream."""
        events = [line[6:] for line in self.received.split(b"\n") if line.startswith(b"data: {")]
        pieces = [json.loads(event)["choices"][0]["text"] for event in events]
        return "".join(pieces)


@contextmanager
def server(model: str) -> Iterator[tuple[str, int]]:
    """Run a server on a free port and yield its address."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent / "src")}
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", "serve", model, "--port", "0"],
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


def ask(address: tuple[str, int], prompts: Sequence[str], **fields: Any) -> list[Client]:
    """Send one streamed request for each prompt at once, and read them all to their ends."""
    clients = []
    with selectors.DefaultSelector() as selector:
        for prompt in prompts:
            body = json.dumps(
                {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
                | {"stream": True}
                | fields
            ).encode()
            sock = socket.create_connection(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
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
                client.num_reads += 1
                client.received += piece
                if not piece or b"[DONE]" in piece:
                    client.last_s = now
                    selector.unregister(client.sock)
                    client.sock.close()
                    left -= 1
    return clients


def overhead(
    address: tuple[str, int], engine: Any, prompts: Sequence[str], mode: str, trials: int
) -> dict[str, float]:
    """Return milliseconds a token of a stream and of `generate`, each the median of trials."""
    params = SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, k="off" if mode == "off" else None
    )
    served, alone = [], []
    for trial in range(trials):
        prompt = prompts[trial % len(prompts)]
        (reply,) = engine.generate([prompt], params)
        alone.append(reply.timing.decode_s / (TOKENS - 1))
        (client,) = ask(address, [prompt], speculation={"mode": mode})
        served.append((client.last_s - client.first_s) / (TOKENS - 1))
        if client.text() != reply.text:
            raise SystemExit(f"a stream differs from generate:\n{client.text()!r}\n{reply.text!r}")
    ratios = [s / a for s, a in zip(served, alone, strict=True)]
    return {
        "generate_ms": 1e3 * statistics.median(alone),
        "stream_ms": 1e3 * statistics.median(served),
        "overhead": statistics.median(ratios) - 1,
    }


def throughput(
    address: tuple[str, int], prompts: Sequence[str], mode: str, trials: int
) -> dict[str, float]:
    """Return tokens a second of one client and of eight, prefill included."""
    one_s, many_s = 0.0, 0.0
    for trial in range(trials):
        own = prompts[trial * (CLIENTS + 1) :][: CLIENTS + 1]
        (client,) = ask(address, own[:1], speculation={"mode": mode})
        one_s += client.last_s - client.sent_s
        clients = ask(address, own[1:], speculation={"mode": mode})
        many_s += max(c.last_s for c in clients) - min(c.sent_s for c in clients)
    one, many = trials * TOKENS / one_s, trials * CLIENTS * TOKENS / many_s
    return {"one_tokens_per_s": one, "eight_tokens_per_s": many, "scaling": many / one}


def first_tokens(address: tuple[str, int], prompts: Sequence[str]) -> dict[str, float]:
    """Return the spread of the time to the first token at eight clients."""
    seconds = []
    for turn in range(TTFT_ROUNDS):
        own = prompts[turn * CLIENTS :][:CLIENTS]
        seconds += [c.first_s - c.sent_s for c in ask(address, own, max_tokens=16)]
    seconds.sort()
    p95 = seconds[min(len(seconds) - 1, round(0.95 * len(seconds)))]
    return {"p50_s": statistics.median(seconds), "p95_s": p95, "requests": len(seconds)}


def pieces(engine: Any, count: int) -> list[str]:
    """Return texts of about PROMPT tokens each, all different, in an order that never repeats."""
    words = sample_text().split()
    found = []
    for index in range(count):
        start = (index * 37) % (len(words) - PROMPT)
        text = f"{index}: " + " ".join(words[start : start + PROMPT])
        ids = engine.tokenizer.encode(text, parse_special=False)[:PROMPT]
        found.append(engine.tokenizer.decode(ids))
    return found


def main() -> int:
    """Print the bars, the table and one JSON line; return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = load(str(find_model(options.model)), profile="off")
    num_prompts = options.trials * (CLIENTS + 1)
    prompts = pieces(engine, max(num_prompts, TTFT_ROUNDS * CLIENTS) * 3)
    result: dict[str, Any] = {"schema": 1, "overhead": {}, "throughput": {}}
    with server(options.model) as address:
        ask(address, prompts[-2:])  # what is done once
        engine.generate(prompts[-2:], SamplingParams(max_tokens=TOKENS))
        for mode in ("off", "auto"):
            result["overhead"][mode] = overhead(address, engine, prompts, mode, options.trials)
        for index, mode in enumerate(("off", "auto")):
            own = prompts[num_prompts * index :]
            result["throughput"][mode] = throughput(address, own, mode, options.trials)
        result["first_token"] = first_tokens(address, prompts[2 * num_prompts :])
    print(
        f"bars: a token of a stream <= {OVERHEAD_BAR:.0%} later than generate's, "
        f"{CLIENTS} clients >= {SCALING_BAR} x one, first token p95 <= {TTFT_BAR_S} s\n"
    )
    print(f"{'speculation':>11} {'generate ms':>12} {'stream ms':>10} {'overhead':>9}", end="")
    print(f" {'one tok/s':>10} {'eight tok/s':>12} {'scaling':>8}")
    for mode in ("off", "auto"):
        cost, rate = result["overhead"][mode], result["throughput"][mode]
        print(
            f"{mode:>11} {cost['generate_ms']:>12.3f} {cost['stream_ms']:>10.3f} "
            f"{cost['overhead']:>9.1%} {rate['one_tokens_per_s']:>10.0f} "
            f"{rate['eight_tokens_per_s']:>12.0f} {rate['scaling']:>8.2f}"
        )
    first = result["first_token"]
    print(f"\nfirst token at {CLIENTS} clients: p50 {first['p50_s']:.3f} s, p95 {first['p95_s']:.3f} s")
    result["provenance"] = provenance()
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
