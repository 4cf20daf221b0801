"""Profiles on disk: whole or ignored, for their own pairing, and checked before use."""

from __future__ import annotations

import json
import logging
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.policy.choose import MeasuredPolicy
from slipstream.policy.profile import (
    LARGEST,
    ProfileKey,
    load_profile,
    passes_sentinel,
    read_profile,
    save_profile,
)
from slipstream.policy.simulator import run
from tests.policy.worlds import calibrate, flat_world, share_drafting, view

KEY = ProfileKey(target="a1", drafter="b2", device="cpu avx512", driver="", kernels="c3")
WORLD = flat_world(0.8, free=False)


@pytest.fixture
def learned() -> MeasuredPolicy:
    policy = MeasuredPolicy()
    calibrate(policy, WORLD)
    run(WORLD, policy, random.Random(0), num_rounds=300)
    policy.ledger.debt_s = 0.0123
    return policy


def test_profile_survives_a_restart_with_its_debt(learned: MeasuredPolicy, tmp_path: Path) -> None:
    save_profile(tmp_path, KEY, learned)
    policy = MeasuredPolicy()
    assert load_profile(tmp_path, KEY, policy)
    for rows in range(1, 9):
        assert policy.cost.verify.time_s(rows, 200) == learned.cost.verify.time_s(rows, 200)
    assert policy.cost.drafting.times(1) == learned.cost.drafting.times(1)
    for known, before in zip(policy.acceptance, learned.acceptance, strict=True):
        assert known.chances == pytest.approx(before.chances, abs=1e-4)
    assert policy.ledger.debt_s == 0.0123
    # Nothing drafts before the classic step was timed in this process.
    assert policy.choose(view(context_len=200)).reason.startswith(("unmeasured", "classic"))
    run(WORLD, policy, random.Random(1), num_rounds=2)
    assert policy.choose(view(context_len=200)).reason.startswith("enable")
    steps = run(WORLD, policy, random.Random(1), num_rounds=50)
    assert share_drafting(steps) > 0.8


def test_another_pairing_or_device_has_none(learned: MeasuredPolicy, tmp_path: Path) -> None:
    save_profile(tmp_path, KEY, learned)
    for change in ({"target": "x"}, {"drafter": "x"}, {"device": "x"}, {"driver": "x"}):
        assert not load_profile(tmp_path, replace(KEY, **change), MeasuredPolicy())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"version": 2, "state": {}}',
        "\x00\x01",
        "[" * 100_000,
    ],
)
def test_damaged_file_is_ignored_with_one_line(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / KEY.file_name).write_text(text, encoding="utf-8")
    policy = MeasuredPolicy()
    before = policy.snapshot()
    with caplog.at_level(logging.INFO):
        assert not load_profile(tmp_path, KEY, policy)
    assert len(caplog.records) == 1
    assert "is ignored" in caplog.text
    assert policy.snapshot() == before


def change_state(path: Path, change: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(version=1),
        lambda content: content["key"].update(target="other"),
        lambda content: content["state"].pop("cost"),
        lambda content: content["state"].update(debt_s=float("nan")),
        lambda content: content["state"].update(debt_s="much"),
        lambda content: content["state"]["cost"]["verify"].append([1, 2]),
        lambda content: content["state"]["cost"]["verify"].append([4, 9, -1.0, 0, 0, 1]),
        lambda content: content["state"].update(acceptance=3),
    ],
)
def test_foreign_file_is_ignored_and_changes_nothing(
    change: Any, learned: MeasuredPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_state(save_profile(tmp_path, KEY, learned), change)
    policy = MeasuredPolicy()
    before = policy.snapshot()
    assert not load_profile(tmp_path, KEY, policy)
    assert policy.snapshot() == before
    assert len(caplog.records) == 1


def test_no_profile_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not load_profile(tmp_path / "nowhere", KEY, MeasuredPolicy())
    assert not caplog.records


def test_failed_write_leaves_the_old_profile(
    learned: MeasuredPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_profile(tmp_path, KEY, learned)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    learned.ledger.debt_s = 9.0
    with pytest.raises(OSError, match="no space left"):
        save_profile(tmp_path, KEY, learned)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_sentinel_accepts_the_same_machine_and_discards_another(
    learned: MeasuredPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(rows: int) -> float:
        return WORLD.forward_s(rows, 0, 0)

    caplog.set_level(logging.INFO)
    assert passes_sentinel(learned, measure)
    assert passes_sentinel(learned, lambda rows: 1.1 * measure(rows))
    assert not passes_sentinel(learned, lambda rows: 1.5 * measure(rows))
    assert not passes_sentinel(learned, lambda rows: measure(1) * rows)
    assert "the profile is set aside: 4 rows take" in caplog.text
    assert not passes_sentinel(MeasuredPolicy(), measure)


DAMAGE: list[tuple[tuple[Any, ...], Any]] = [
    (("debt_s",), 10**400),
    (("debt_s",), 1e300),
    (("debt_s",), -1.0),
    (("debt_s",), True),
    (("cost", "draft", 0, 0), 0),
    (("cost", "draft", 0, 0), 1.5),
    (("cost", "draft", 0, 1), 0),
    (("cost", "draft", 0, 1), 1.5),
    (("cost", "draft", 0, 1), 99),
    (("cost", "peek"), [[1.0, 0.0, 0.0]]),
    (("cost", "peek"), [[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]]),
    (("cost", "classic", 0, 0), 0.5),
    (("cost", "classic", 0, 2), 0.0),
    (("cost", "verify", 0, 1), 0),
    (("cost", "verify", 0, 1), 1e18),
    (("cost", "verify", 0, 2), []),
    (("cost", "verify", 0), [1, 2]),
    (("cost", "verify"), {}),
    (("cost", "overheads", 0, 0), []),
    (("cost", "overheads"), []),
    (("acceptance", 1, 0), []),
    (("acceptance", 1, 0), 1.7e308),
    (("acceptance", 0), []),
    (("acceptance", 0), [0.5] * 99),
    (("acceptance",), []),
    (("acceptance",), [[0.5]]),
    (("cost",), None),
]


@pytest.mark.parametrize(("place", "value"), DAMAGE)
def test_one_wrong_number_anywhere_is_one_line_and_no_profile(
    learned: MeasuredPolicy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    place: tuple[Any, ...],
    value: Any,
) -> None:
    path = save_profile(tmp_path, KEY, learned)
    content = json.loads(path.read_text())
    spot = content["state"]
    for step in place[:-1]:
        spot = spot[step]
    assert spot[place[-1]] != value
    spot[place[-1]] = value
    path.write_text(json.dumps(content))
    policy = MeasuredPolicy()
    before = policy.snapshot()
    assert not load_profile(tmp_path, KEY, policy)
    assert policy.snapshot() == before
    assert [record.getMessage() for record in caplog.records] == [
        f"profile {path} is ignored: it is damaged"
    ]
    with pytest.raises(ConfigError, match="it is damaged"):
        read_profile(tmp_path, KEY)


def test_what_is_no_plain_file_is_not_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / KEY.file_name)
    assert not load_profile(tmp_path, KEY, MeasuredPolicy())
    assert "it is damaged" in caplog.text
    (tmp_path / KEY.file_name).unlink()
    (tmp_path / KEY.file_name).write_text(" " * (LARGEST + 1))
    assert not load_profile(tmp_path, KEY, MeasuredPolicy())


def test_a_profile_of_another_pairing_is_not_shown_for_this_one(
    learned: MeasuredPolicy, tmp_path: Path
) -> None:
    path = save_profile(tmp_path, KEY, learned)
    other = replace(KEY, target="x")
    path.rename(tmp_path / other.file_name)
    with pytest.raises(ConfigError, match="another pairing"):
        read_profile(tmp_path, other)
    with pytest.raises(ConfigError, match="there is no profile"):
        read_profile(tmp_path, KEY)
