"""The official client against a real server process; replies are those of `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from slipstream.engine.engine import Engine
from slipstream.types import DetailedReply, SamplingParams
from tests.server.process import PATIENCE_S, ServerProcess, eventually

openai = pytest.importorskip("openai", reason="the official client is not installed")

TURNS: list[Any] = [{"role": "user", "content": "hello world"}]
GREEDY: dict[str, Any] = {"model": "toy", "temperature": 0}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def spoken(stream: Any) -> str:
    """Return the text of a chat stream."""
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


def test_whole_and_streamed_chat_say_what_generate_says(client: Any, alone: Engine) -> None:
    for fields in (
        {"temperature": 0, "max_tokens": 60},
        {"temperature": 0.9, "top_p": 0.8, "seed": 7, "max_tokens": 60},
        {"temperature": 1.2, "seed": 2**53, "presence_penalty": 0.7, "max_tokens": 33},
    ):
        reply = alone.generate([TURNS], SamplingParams(**fields))[0]
        whole = client.chat.completions.create(model="toy", messages=TURNS, **fields)
        stream = client.chat.completions.create(model="toy", messages=TURNS, stream=True, **fields)
        assert whole.choices[0].message.content == reply.text
        assert whole.choices[0].finish_reason == reply.finish_reason
        assert whole.usage.completion_tokens == reply.usage.completion_tokens
        assert whole.usage.prompt_tokens == reply.usage.prompt_tokens
        assert spoken(stream) == reply.text


def test_every_sampling_field_reaches_the_engine(client: Any, alone: Engine) -> None:
    own = {
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 5,
        "stop_token_ids": [70],
        "ignore_eos": True,
        "bad_words": ["it"],
        "bad_words_ids": [[80, 81]],
    }
    shared = {
        "max_tokens": 50,
        "temperature": 0.8,
        "top_p": 0.95,
        "seed": 11,
        "n": 2,
        "stop": ["hello", "zz"],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    params = SamplingParams(logit_bias={5: 3.0, 99: -100.0}, **shared, **own)
    expected = alone.generate([TURNS], params)
    reply = client.chat.completions.create(
        model="toy",
        messages=TURNS,
        logit_bias={"5": 3.0, "99": -100.0},
        extra_body=own,
        **shared,
    )
    assert [c.message.content for c in reply.choices] == [r.text for r in expected]
    assert [c.index for c in reply.choices] == [0, 1]


def test_usage_comes_last_and_only_where_it_is_asked_for(client: Any) -> None:
    plain = list(
        client.chat.completions.create(messages=TURNS, max_tokens=5, stream=True, **GREEDY)
    )
    assert all(chunk.usage is None for chunk in plain)
    counted = list(
        client.chat.completions.create(
            messages=TURNS,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert [chunk.usage is None for chunk in counted] == [True] * (len(counted) - 1) + [False]
    assert counted[-1].choices == []
    assert counted[-1].usage.completion_tokens == 5
    assert counted[0].choices[0].delta.role == "assistant"


def test_logprobs_of_chat_are_the_engines(client: Any, alone: Engine) -> None:
    params = SamplingParams(max_tokens=12, logprobs=3)
    (reply,) = alone.generate([TURNS], params)
    assert isinstance(reply, DetailedReply)
    assert reply.logprobs is not None
    asked = {"max_tokens": 12, "logprobs": True, "top_logprobs": 3, "messages": TURNS, **GREEDY}
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in client.chat.completions.create(stream=True, **asked)
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole
    assert [entry.logprob for entry in whole] == [entry.logprob for entry in reply.logprobs]
    assert [[t.logprob for t in entry.top_logprobs] for entry in whole] == [
        [logprob for _, logprob in entry.top] for entry in reply.logprobs
    ]
    spelled = b"".join(bytes(entry.bytes) for entry in whole)
    assert spelled.decode(errors="replace") == reply.text


def test_text_completions_take_texts_and_ids(client: Any, alone: Engine) -> None:
    prompts: list[Any] = ["hello", "world"]
    params = SamplingParams(max_tokens=16, n=2)
    expected = [r.text for r in alone.generate(prompts, params)]
    reply = client.completions.create(prompt=prompts, n=2, **GREEDY)
    assert [c.text for c in reply.choices] == expected
    ids = [alone.tokenizer.encode(text, parse_special=False) for text in prompts]
    assert [
        c.text for c in client.completions.create(prompt=ids, n=2, **GREEDY).choices
    ] == expected
    streams: dict[int, str] = {}
    for chunk in client.completions.create(prompt=prompts, n=2, stream=True, **GREEDY):
        choice = chunk.choices[0]
        streams[choice.index] = streams.get(choice.index, "") + choice.text
    assert [streams[index] for index in range(4)] == expected
    one = client.completions.create(prompt="hello", logprobs=2, **GREEDY).choices[0]
    assert len(one.logprobs.tokens) == len(one.logprobs.text_offset) == 16
    assert all(len(top) <= 2 for top in one.logprobs.top_logprobs)


def test_a_request_lowers_the_ceiling_and_never_the_text(client: Any) -> None:
    asked = {"messages": TURNS, "max_tokens": 150, **GREEDY}
    replies = {}
    for mode in ({"mode": "off"}, {"mode": "auto"}, {"mode": "fixed", "k": 3}):
        reply = client.chat.completions.create(extra_body={"speculation": mode}, **asked)
        replies[mode["mode"]] = reply
    texts = {reply.choices[0].message.content for reply in replies.values()}
    assert len(texts) == 1
    reports = {
        mode: reply.slipstream["choices"][0]["speculation"] for mode, reply in replies.items()
    }
    assert reports["off"]["rounds"] == reports["off"]["drafted"] == 0
    assert (reports["off"]["mode"], reports["off"]["sources"]) == (
        "off",
        {"ngram": {"drafted": 0, "accepted": 0}},
    )
    assert reports["fixed"]["mode"] == "fixed:3"
    assert reports["fixed"]["rounds"] > 0
    assert set(reports["fixed"]["k_histogram"]) <= {"1", "2", "3"}
    with pytest.raises(openai.BadRequestError, match="got 16") as wide:
        client.chat.completions.create(
            extra_body={"speculation": {"mode": "fixed", "k": 16}}, **asked
        )
    assert wide.value.param == "speculation.k"


def test_a_schema_is_kept_in_every_mode(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Answer(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        sure: bool
        colour: Literal["red", "blue"]

    texts = set()
    for mode in ({"mode": "off"}, {"mode": "fixed", "k": 5}):
        reply = client.chat.completions.parse(
            messages=TURNS,
            response_format=Answer,
            max_tokens=200,
            extra_body={"speculation": mode},
            **GREEDY,
        )
        texts.add(reply.choices[0].message.content)
        assert isinstance(reply.choices[0].message.parsed, Answer)
        assert reply.usage.completion_tokens_details is None
    assert len(texts) == 1


def test_a_prediction_is_drafted_from_and_counted_and_changes_nothing(client: Any) -> None:
    asked = {"messages": TURNS, "max_tokens": 80, **GREEDY}
    plain = client.chat.completions.create(**asked)
    text = plain.choices[0].message.content
    counts = {}
    for name, content in (("right", text), ("wrong", "never said " * 20)):
        reply = client.chat.completions.create(
            prediction={"type": "content", "content": content}, **asked
        )
        assert reply.choices[0].message.content == text
        details = reply.usage.completion_tokens_details
        counts[name] = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        own = reply.slipstream["choices"][0]["speculation"]["sources"]["prediction"]
        assert counts[name] == (own["accepted"], own["drafted"] - own["accepted"])
    assert plain.usage.completion_tokens_details is None
    assert counts["wrong"][0] <= counts["right"][0]


def test_refusals_are_the_clients_own_exceptions(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here") as missing:
        client.chat.completions.create(model="gpt-5", messages=TURNS)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="toy", prompt="x" * 5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(messages=TURNS, top_p=0, stream=True, **GREEDY)
    assert wrong.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as pattern:
        client.completions.create(prompt="a", extra_body={"guided_regex": "("}, **GREEDY)
    assert pattern.value.param == "guided_regex"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="toy", input="x")


def test_models_are_listed(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "toy"
    assert client.models.retrieve("toy").owned_by == "slipstream"


def test_a_stream_that_is_closed_frees_its_pages(client: Any, server: ServerProcess) -> None:
    stream = client.completions.create(
        prompt="hello", max_tokens=4000, extra_body={"ignore_eos": True}, stream=True, **GREEDY
    )
    next(iter(stream))
    stream.close()
    eventually(server.is_idle)


def test_many_clients_share_steps_and_get_their_own_text(
    server: ServerProcess, alone: Engine
) -> None:
    prompts: list[Any] = [f"hello {index}" for index in range(24)]
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=5)
    expected = [reply.text for reply in alone.generate(prompts, params)]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S
        ) as client:
            asked = [
                client.completions.create(
                    model="toy", prompt=prompt, max_tokens=40, temperature=0.7, seed=5
                )
                for prompt in prompts
            ]
            return [reply.choices[0].text for reply in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == expected
