"""The target in torch agrees with the served one, and its conversations keep to their rules."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from slipstream.train import generate  # noqa: E402
from slipstream.train.generate import REPLY, USER, Opening, converse  # noqa: E402
from slipstream.train.target import logits_of  # noqa: E402
from tests.tiny import (  # noqa: E402
    make_backend,
    make_rows,
    tiny_arch,
    tiny_model,
    tiny_tensors,
)
from tests.train.worlds import SCRIPT, random_ids, tiny_target  # noqa: E402


@pytest.mark.parametrize("changes", [{}, {"tied_embedding": False, "rope_interleaved": False}])
def test_logits_are_those_of_the_reference_back_end(changes: dict[str, bool]) -> None:
    tensors = tiny_tensors(tiny_arch(**changes))
    target = tiny_target(tensors)
    model = tiny_model(make_backend("reference"), tensors)
    ids = random_ids(1, 20)
    rows = make_rows(ids[0].tolist(), list(range(20)), [[1, 2]])
    expected = np.array(model.step(rows).logits)
    found = logits_of(target.forward(ids).hidden, target.output)[0].numpy()
    # The served model keeps K and V in 16 bits.
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05)


def test_a_trace_is_what_the_layers_saw() -> None:
    target, ids = tiny_target(), random_ids(2, 9)
    trace = target.forward(ids, (1, 2), (1,))
    assert [tuple(stream.shape) for stream in trace.features] == [(2, 9, 64)] * 2
    assert torch.equal(target.normed(trace.features[1], target.norm), trace.hidden)
    k, v = trace.kv[0]
    assert tuple(k.shape) == tuple(v.shape) == (2, 2, 9, 16)


def opening(ids: list[int], role: int = USER, temperature: float = 0.0, **options: int) -> Opening:
    limits = options.get("user", 6), options.get("reply", 9)
    return Opening(ids=ids, role=role, temperatures=(temperature, temperature), limits=limits)


def test_greedy_tokens_are_the_forwards_own() -> None:
    target = tiny_target()
    made = converse(
        target,
        SCRIPT,
        [opening([9, 11, 12], REPLY, reply=99), opening([8], REPLY, reply=99)],
        24,
        0,
    )
    logits = logits_of(target.forward(made.ids).hidden, target.output)
    logits[:, :, list(SCRIPT.banned_ids)] = -torch.inf
    choices = logits.argmax(2)
    for row, given in ((0, 3), (1, 1)):
        for position in range(given, 24):
            if bool(made.replies[row, position]) and int(made.ids[row, position]) not in (2, 3):
                assert made.ids[row, position] == choices[row, position - 1]
    assert made.replies.sum() > 20


def test_turns_alternate_with_the_templates_markers_between() -> None:
    made = converse(tiny_target(), SCRIPT, [opening([9], temperature=1.0)] * 4, 60, 3)
    assert (made.ids[:, 0] == 9).all()
    for ids, replies in zip(made.ids.tolist(), made.replies.tolist(), strict=True):
        at, role, turn_len = 1, USER, 0
        turns = 0
        while at < 60:
            marker = SCRIPT.to_reply if role == USER else SCRIPT.to_user
            if ids[at] == marker[0]:
                shown = ids[at : at + len(marker)]
                assert tuple(shown) == marker[: len(shown)]
                assert replies[at] is (role == REPLY)
                assert not any(replies[at + 1 : at + len(marker)])
                at, role, turn_len, turns = at + len(marker), 1 - role, 0, turns + 1
                continue
            assert ids[at] not in SCRIPT.banned_ids
            assert replies[at] is (role == REPLY)
            turn_len += 1
            assert turn_len <= (6, 9)[role]
            at += 1
        assert turns >= 5


def test_what_is_written_depends_on_the_seed_alone() -> None:
    target, openings = tiny_target(), [opening([9, 10], temperature=1.0)] * 3
    first, again, other = (converse(target, SCRIPT, openings, 30, seed) for seed in (1, 1, 500))
    assert torch.equal(first.ids, again.ids)
    assert not torch.equal(first.ids, other.ids)
    assert not torch.equal(first.ids[0], first.ids[1])


def test_an_opening_longer_than_the_conversation_is_cut() -> None:
    made = converse(tiny_target(), SCRIPT, [opening(list(range(10, 40)))], 12, 0)
    assert made.ids[0].tolist() == list(range(10, 22))
    assert not made.replies.any()


def test_what_all_openings_give_is_read_at_once_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    openings = [
        opening(random_ids(1, length, seed=length)[0].tolist(), REPLY, temperature=length % 2)
        for length in (19, 22, 40)
    ]
    plain = converse(target, SCRIPT, openings, 60, 5)
    given_len = []
    read = generate._Cache.read
    monkeypatch.setattr(
        generate._Cache,
        "read",
        lambda cache, ids: (given_len.append(ids.shape[1]), read(cache, ids))[1],
    )
    monkeypatch.setattr(generate, "_READ_AT_ONCE", 8)
    at_once = converse(target, SCRIPT, openings, 60, 5)
    assert given_len == [16]  # the shortest's 19th token is what the first choice is made from
    assert torch.equal(plain.ids, at_once.ids)
    assert torch.equal(plain.replies, at_once.replies)
