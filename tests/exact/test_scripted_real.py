"""A scripted drafter on real forwards: acceptance as asked for, and the model's own text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

import slipstream
from slipstream.drafters.scripted import ScriptedDrafter, ScriptedSpec
from slipstream.errors import LoadError
from slipstream.models.loading import resolve_model
from slipstream.types import Reply, SamplingParams

pytestmark = pytest.mark.real_model

NUM_TOKENS = 120
# Engines in turn have the pages of one target, so neither may count on what it left there.
CONFIG = slipstream.EngineConfig(max_model_len=256, prefix_cache="off")
PROMPT = "The harbour master keeps a log of every ship that enters the harbour."


@pytest.fixture(scope="module")
def classic() -> slipstream.Engine:
    """An engine that never drafts."""
    try:
        model = resolve_model("smollm2-135m")
    except LoadError as error:
        pytest.skip(error.message)
    return slipstream.load(model, dataclasses.replace(CONFIG, drafter="none"))


def reply_of(engine: slipstream.Engine, prompt: Sequence[int], **params: object) -> Reply:
    asked = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params)  # type: ignore[arg-type]
    (reply,) = engine.generate([list(prompt)], asked)
    return reply


def by_replay(drafter: ScriptedDrafter, script: list[int], begin: int, k: int) -> dict[str, int]:
    """Return the rounds and acceptances that the script and the drafter's mistakes imply."""
    text, counts = script[: begin + 1], {"rounds": 0, "drafted": 0, "accepted": 0}
    while len(text) < begin + NUM_TOKENS:
        drafts = drafter.propose(text, min(k, begin + NUM_TOKENS - len(text) - 1))
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == script[len(text) + accepted]:
            accepted += 1
        text = script[: len(text) + accepted + 1]
        counts["rounds"] += bool(drafts)
        counts["drafted"] += len(drafts)
        counts["accepted"] += accepted
    return counts


@pytest.mark.parametrize("k", [1, 4, 15])
@pytest.mark.parametrize("spec", ["scripted:0.56", "scripted:0.9,0.6,0.3@7", "scripted:1"])
def test_acceptance_on_real_forwards_is_the_script_s(
    classic: slipstream.Engine, spec: str, k: int
) -> None:
    prompt = classic.tokenizer.encode(PROMPT, parse_special=False)
    script = [*prompt, *reply_of(classic, prompt).token_ids]

    def drafter() -> ScriptedDrafter:
        vocab_size = classic.target.arch.vocab_size
        return ScriptedDrafter([script], ScriptedSpec.parse(spec), vocab_size=vocab_size)

    config = dataclasses.replace(CONFIG, k=k)
    engine = slipstream.Engine(
        classic.target, classic.tokenizer, config=config, make_drafters=[drafter]
    )
    reply = reply_of(engine, prompt)
    assert reply.token_ids == script[len(prompt) :]
    report = reply.speculation
    got = {name: getattr(report, name) for name in ("rounds", "drafted", "accepted")}
    assert got == by_replay(drafter(), script, len(prompt), k)


def test_a_sampled_reply_leaves_the_script_and_is_the_classic_one(
    classic: slipstream.Engine,
) -> None:
    prompt = classic.tokenizer.encode(PROMPT, parse_special=False)
    script = [*prompt, *reply_of(classic, prompt).token_ids]

    def drafter() -> ScriptedDrafter:
        vocab_size = classic.target.arch.vocab_size
        return ScriptedDrafter([script], ScriptedSpec(rates=(1.0,)), vocab_size=vocab_size)

    config = dataclasses.replace(CONFIG, k=6)
    engine = slipstream.Engine(
        classic.target, classic.tokenizer, config=config, make_drafters=[drafter]
    )
    sampled = [reply_of(e, prompt, temperature=1.0, seed=5) for e in (classic, engine)]
    assert sampled[0].token_ids == sampled[1].token_ids
    assert sampled[1].token_ids != script[len(prompt) :]
    assert sampled[1].speculation.classic_rounds > 0  # nothing was proposed any more
