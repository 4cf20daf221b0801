"""What a grammar costs a reply, and what it and a prediction give back as drafts.

Prints the bound first (a classic step without a grammar), then microseconds of the parts of a
masked row, then tokens a second of each arm, and one JSON line last. Arms take turns on every
prompt; the texts of arms that must agree are compared.

    python benchmarks/structured.py --json docs/benchmark_results/structured.json

Exit code: 0; 1 if texts differ or a reply that ended is not valid JSON; 2 for bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from provenance import DEFAULT_MODEL, find_model, provenance

import slipstream
from slipstream.engine.engine import Engine
from slipstream.engine.grammar import Grammars
from slipstream.engine.matcher import Matcher
from slipstream.engine.sampling import Sampler
from slipstream.types import Grammar, Reply, SamplingParams

STRING, COUNT = {"type": "string", "maxLength": 60}, {"type": "integer", "minimum": 0}
LIST = {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 5}
YES_OR_NO = {"type": "boolean"}
# What a reply is about, and its fields.
TASKS: list[tuple[str, dict[str, Any]]] = [
    ("a fictional person", {"name": STRING, "age": COUNT, "profession": STRING, "hobbies": LIST}),
    ("a recipe for soup", {"title": STRING, "ingredients": LIST, "minutes": COUNT, "steps": LIST}),
    ("a bug report", {"summary": STRING, "severity": {"enum": ["low", "high"]}, "steps": LIST}),
    ("a train journey", {"origin": STRING, "destination": STRING, "stops": LIST, "price": COUNT}),
    ("a library book", {"title": STRING, "author": STRING, "pages": COUNT, "subjects": LIST}),
    ("an invoice", {"customer": STRING, "items": LIST, "total": COUNT, "paid": YES_OR_NO}),
    ("a weather report", {"place": STRING, "celsius": COUNT, "sky": STRING, "warnings": LIST}),
    ("a football match", {"home": STRING, "away": STRING, "goals": COUNT, "scorers": LIST}),
]
MAX_TOKENS = 160


def schema_of(fields: dict[str, Any]) -> Grammar:
    """Return the grammar of an object of exactly these fields."""
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    text = json.dumps({**schema, "required": list(fields)})
    return Grammar(kind="json_schema", definition=text)


def prompt_of(what: str, fields: dict[str, Any]) -> list[dict[str, str]]:
    """Return a conversation that asks for JSON."""
    names = ", ".join(fields)
    return [{"role": "user", "content": f"Describe {what} as a JSON object with {names}."}]


@dataclass
class Arm:
    """One way to answer; `same` names the arm whose texts it must reproduce."""

    name: str
    same: str
    params: Callable[[dict[str, Any], str], dict[str, Any]]
    tokens: int = 0
    seconds: float = 0.0
    rows: int = 0
    ended: int = 0
    sources: dict[str, list[int]] = field(default_factory=dict)
    patch: str = ""

    def add(self, reply: Reply) -> None:
        """Count a reply."""
        self.tokens += reply.usage.completion_tokens - 1
        self.seconds += reply.timing.decode_s
        self.rows += reply.speculation.drafted + reply.usage.completion_tokens
        self.ended += reply.finish_reason == "stop"
        for name, counts in reply.speculation.sources.items():
            own = self.sources.setdefault(name, [0, 0])
            own[0] += counts["drafted"]
            own[1] += counts["accepted"]

    def as_json(self) -> dict[str, Any]:
        """Return what is reported."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 4),
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "ms_per_token": round(1000 * self.seconds / self.tokens, 3),
            "ended": self.ended,
            "sources": {name: counts for name, counts in self.sources.items() if counts[0]},
        }


def arms() -> list[Arm]:
    """Return all arms, those that others must agree with first."""
    sampled = {"temperature": 0.8, "seed": 1}
    read = {"logit_bias": {0: 0.0}}  # changes nothing, but has the host pick from the logits

    def schema(k: Any, **more: Any) -> Callable[[dict[str, Any], str], dict[str, Any]]:
        return lambda fields, _text: {"grammar": schema_of(fields), "k": k, **more}

    def an_object(k: Any) -> Callable[[dict[str, Any], str], dict[str, Any]]:
        return lambda _fields, _text: {"grammar": Grammar(kind="json_object"), "k": k}

    def predicted(fields: dict[str, Any], text: str) -> dict[str, Any]:
        return {"grammar": schema_of(fields), "k": "auto", "prediction": text}

    return [
        Arm("no grammar, off", "", lambda *_: {"k": "off"}),
        Arm("no grammar, logits read, off", "no grammar, off", lambda *_: {**read, "k": "off"}),
        Arm("no grammar, auto", "no grammar, off", lambda *_: {"k": "auto"}),
        Arm("json_object, off", "", an_object("off")),
        Arm("json_object, auto", "json_object, off", an_object("auto")),
        Arm("json_schema, off", "", schema("off")),
        Arm("json_schema, auto", "json_schema, off", schema("auto")),
        Arm("the same, nothing forced", "json_schema, off", schema("auto"), patch="forced"),
        Arm("the same, nothing cut", "json_schema, off", schema("auto"), patch="allowed_prefix"),
        Arm("the same, edited prediction", "json_schema, off", predicted),
        Arm("sampled, no grammar, off", "", lambda *_: {"k": "off", **sampled}),
        Arm("sampled, json_schema, off", "", schema("off", **sampled)),
        Arm("sampled, json_schema, auto", "sampled, json_schema, off", schema("auto", **sampled)),
    ]


@contextmanager
def patched(name: str) -> Iterator[None]:
    """Do without a part of the matcher for a while."""
    plain: dict[str, Any] = {
        "forced": lambda _self: [],
        "allowed_prefix": lambda _self, token_ids: list(token_ids),
    }
    if not name:
        yield
        return
    own = getattr(Matcher, name)
    setattr(Matcher, name, plain[name])
    try:
        yield
    finally:
        setattr(Matcher, name, own)


def run(engines: dict[str, Engine], all_arms: list[Arm], laps: int) -> list[str]:
    """Answer every prompt by every arm; return what does not agree."""
    wrong: list[str] = []
    for lap in range(laps):
        for task, (what, fields) in enumerate(TASKS):
            texts: dict[str, str] = {}
            order = all_arms if lap % 2 == 0 else [*all_arms[:1], *all_arms[:0:-1]]
            order = sorted(order, key=lambda arm: bool(arm.same))  # what others are compared with
            for arm in order:
                edited = texts.get("json_schema, off", "").replace("a", "the", 2)
                params = SamplingParams(max_tokens=MAX_TOKENS, **arm.params(fields, edited))
                with patched(arm.patch):
                    (reply,) = engines[arm.name].generate([prompt_of(what, fields)], params)
                arm.add(reply)
                texts[arm.name] = reply.text
                if arm.same and texts[arm.same] != reply.text:
                    wrong.append(f"{arm.name}, task {task}: {reply.text!r}")
                if params.grammar is not None and reply.finish_reason == "stop":
                    json.loads(reply.text)
    return wrong


def parts_us(engine: Engine) -> dict[str, list[float]]:
    """Return median, 95th percentile and mean of the microseconds of a masked row's parts."""
    vocab_size = engine.target.arch.vocab_size
    row = np.random.default_rng(0).normal(0, 3, vocab_size).astype(np.float32)
    sampler = Sampler(SamplingParams(), vocab_size=vocab_size, seed=0, kernel=engine._kernel)
    stops = engine.tokenizer.stop_ids
    plain = sampler.history([0])
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = call()
        times.setdefault(name, []).append(1e6 * (time.perf_counter() - began))
        return value

    for what, fields in TASKS:
        grammar = schema_of(fields)
        params = SamplingParams(max_tokens=MAX_TOKENS, grammar=grammar, k="off")
        (reply,) = engine.generate([prompt_of(what, fields)], params)
        fresh = Grammars(engine.tokenizer, vocab_size)
        fresh._tokens = engine._grammars._llguidance_tokens()
        timed("compile", lambda own=fresh, g=grammar: own.matcher(g, stops))
        matcher = timed("copy", lambda own=fresh, g=grammar: own.matcher(g, stops))
        history = sampler.history([0], matcher)
        for at, token_id in enumerate(reply.token_ids):
            drafts = reply.token_ids[at : at + 4]
            timed("cut 4 drafts", lambda m=matcher, d=drafts: m.allowed_prefix(d))
            timed("forced", matcher.forced)
            timed("argmax allowed", lambda m=matcher, t=token_id: m.surely_allows(t))
            timed("mask", matcher.allowed)
            timed("pick, masked", lambda h=history: sampler.pick(row, h, 1))
            timed("pick, not masked", lambda: sampler.pick(row, plain, 1))
            timed("push", lambda h=history, t=token_id: h.push(t))
    return {
        name: [
            round(float(value), 1)
            for value in (np.median(values), np.quantile(values, 0.95), np.mean(values))
        ]
        for name, values in times.items()
    }


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    all_arms = arms()
    settings: dict[str, Any] = {"drafter": "ngram", "profile": "off", "max_model_len": 1024}
    # A policy of its own for each arm: one must not learn from another's drafts.
    engines = {arm.name: slipstream.load(model, **settings) for arm in all_arms}
    first = engines[all_arms[0].name]
    parts = parts_us(first)
    wrong = run(engines, all_arms, arguments.laps)
    bound = all_arms[0].as_json()["ms_per_token"]
    print(f"bound: a classic token without a grammar takes {bound:.3f} ms")
    print(f"{'us':32}{'median':>10}{'p95':>10}{'mean':>10}")
    for name, values in parts.items():
        print(f"{name:32}" + "".join(f"{value:10.1f}" for value in values))
    print(f"{'arm':32}{'tok/s':>8}{'ms/tok':>9}{'ended':>7}  drafted and accepted by source")
    for arm in all_arms:
        report = arm.as_json()
        print(
            f"{arm.name:32}{report['tokens_per_s']:8.1f}{report['ms_per_token']:9.3f}"
            f"{arm.ended:7}  {report['sources']}"
        )
    for line in wrong:
        print(line, file=sys.stderr)
    result = {
        "provenance": provenance(model),
        "laps": arguments.laps,
        "prompts": len(TASKS),
        "parts_us": parts,
        "arms": {arm.name: arm.as_json() for arm in all_arms},
        "mismatches": len(wrong),
    }
    line = json.dumps(result)
    if arguments.json:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
