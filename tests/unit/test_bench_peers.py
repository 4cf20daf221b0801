"""Peers: whatever a worker process does, the caller gets a timed reply or a reason in words."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.peers import PEERS, Peer, PeerError, PeerReply, open_peers
from slipstream.bench.peers.process import WorkerProcess, module_command
from slipstream.bench.peers.worker import cut_at_stop
from tests.gguf_files import real_model

SOURCE = Path(__file__).resolve().parents[2] / "src"
MODULES = {"llama.cpp": "llama_cpp", "transformers": "accelerate", "openvino": "openvino_genai"}
BODY = '''
import os, sys, time
sys.path.insert(0, {source!r})
from slipstream.bench.peers.worker import FIRST_TOKEN, serve

class Fake:
    """Counts up from the last prompt token; its options say what goes wrong."""

    def __init__(self, emit):
        self.emit = emit
        self.kept = None
        {build}

    def describe(self):
        print("chatter of a library")
        os.system("echo chatter of its child")
        return {{"version": "1"}}

    def prepare(self, length, **options):
        if options.get("refused"):
            raise ValueError("no such setting")
        return {{}}

    def keep(self, options):
        self.kept = options
        return {{}}

    def ask_kept(self):
        return {{"kept": self.kept}}

    def reply(self, token_ids, max_tokens, stop_ids, slow_s=0.0, silent=False, refused=False):
        time.sleep(slow_s)
        if not silent:
            self.emit(FIRST_TOKEN)
        time.sleep(slow_s)
        return {{"token_ids": [token_ids[-1] + i + 1 for i in range(max_tokens)]}}

    def die(self):
        print("Traceback", "OSError: the last words", "", sep=chr(10), file=sys.stderr)
        os._exit(3)

    def hang(self):
        time.sleep(600)

    def garble(self):
        os.write(self.protocol, b"not an answer" + bytes([10]))
        time.sleep(600)

    def number(self):
        return 7

    def fail(self):
        raise RuntimeError("the engine refuses")

{start}
'''
START = "serve(Fake)"
KEEPING_PROTOCOL = "Fake.protocol = os.dup(1); serve(Fake)"

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start fake workers, and end them after the test."""
    started: list[WorkerProcess] = []

    def begin(*, build: str = "pass", program: str = START) -> WorkerProcess:
        script = tmp_path / f"fake_{len(started)}.py"
        script.write_text(BODY.format(source=str(SOURCE), build=build, start=program))
        started.append(WorkerProcess([sys.executable, str(script)], deadline_s=30))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def make_peer(process: WorkerProcess, *settings: dict[str, Any]) -> Peer:
    return Peer("fake", process, settings or ({},), {"version": "1"}, [])


def test_chatter_of_libraries_does_not_reach_the_protocol(start: Start) -> None:
    assert start().facts == {"version": "1"}


def test_a_reply_has_the_outside_clock_of_first_and_last_token(start: Start) -> None:
    reply = make_peer(start(), {"slow_s": 0.05}).reply([5, 6], 3, [])
    assert reply == PeerReply(token_ids=[7, 8, 9], first_s=reply.first_s, seconds=reply.seconds)
    assert reply.first_s >= 0.05
    assert reply.seconds - reply.first_s >= 0.05


def test_a_reply_without_a_first_token_is_an_error(start: Start) -> None:
    with pytest.raises(PeerError, match="without a first token"):
        make_peer(start(), {"silent": True}).reply([1], 2, [])


def test_an_error_of_the_engine_leaves_the_worker_usable(start: Start) -> None:
    process = start()
    with pytest.raises(PeerError, match="RuntimeError: the engine refuses"):
        process.ask("fail")
    assert process.is_open
    assert make_peer(process).reply([1], 2, []).token_ids == [2, 3]


def test_death_is_reported_with_the_last_words(start: Start) -> None:
    process = start()
    with pytest.raises(PeerError, match=r"ended, exit code 3: OSError: the last words"):
        process.ask("die")
    with pytest.raises(PeerError, match="gone"):
        process.ask("die")


@pytest.mark.parametrize(("do", "what"), [("garble", "not an answer"), ("number", "'7")])
def test_garbage_ends_the_worker(start: Start, do: str, what: str) -> None:
    process = start(program=KEEPING_PROTOCOL)
    with pytest.raises(PeerError, match=what):
        process.ask(do)
    assert not process.is_open


def test_a_missed_deadline_ends_the_worker(start: Start) -> None:
    process = start()
    with pytest.raises(PeerError, match=r"no answer within 0.2 s"):
        process.ask("hang", deadline_s=0.2)
    assert not process.is_open


def test_a_missing_module_is_named(start: Start) -> None:
    with pytest.raises(PeerError, match="has no module no_such_engine"):
        start(build="import no_such_engine")


def test_a_failing_start_is_an_error(start: Start) -> None:
    with pytest.raises(PeerError, match="NameError"):
        start(program="no_such_name")
    with pytest.raises(PeerError, match="ValueError: no licence"):
        start(build='raise ValueError("no licence")')


def test_settle_keeps_the_fastest_setting_that_works(start: Start) -> None:
    process = start()
    settings: list[dict[str, Any]] = [{"slow_s": 0.2}, {"refused": True}, {"slow_s": 0.0}]
    peer = make_peer(process, *settings)
    peer.settle([1], 2, [])
    assert peer.facts["slow_s"] == 0.0
    assert [tried["slow_s"] for tried in peer.facts["tried"]] == [0.2, 0.0]
    assert process.ask("ask_kept")["kept"] == [{"slow_s": 0.0}]
    assert peer.reply([1], 2, []).token_ids == [2, 3]


def test_settle_without_a_setting_that_works_says_why(start: Start) -> None:
    with pytest.raises(PeerError, match="no such setting"):
        make_peer(start(), {"refused": True}).settle([1], 2, [])


def test_what_another_peer_of_the_process_may_need_is_kept(start: Start) -> None:
    process = start()
    sharing: list[Peer] = []
    first = Peer("plain", process, [{"slow_s": 0.1}, {}], {}, sharing)
    second = Peer("lookup", process, [{"slow_s": 0.3}, {"slow_s": 0.4}], {}, sharing)
    first.settle([1], 2, [])
    assert process.ask("ask_kept")["kept"] == [{}, {"slow_s": 0.3}, {"slow_s": 0.4}]
    first.close()
    first.close()
    assert process.is_open
    second.close()
    assert not process.is_open


def test_a_reply_ends_with_its_first_stop_token_or_at_its_limit() -> None:
    assert cut_at_stop([5, 2, 6, 2], 9, [2, 6]) == [5, 2]
    assert cut_at_stop([5, 2, 6, 2], 1, [2, 6]) == [5]
    assert cut_at_stop([5, 7], 9, []) == [5, 7]


def test_peers_are_not_started_on_a_folder(tmp_path: Path) -> None:
    peers, missing = open_peers(PEERS, tmp_path, progress=pytest.fail)
    assert peers == []
    assert set(missing) == set(PEERS)
    assert all(tmp_path.name in reason for reason in missing.values())


def test_opening_never_raises() -> None:
    model = Path("no_such_model.gguf")
    peers, missing = open_peers([*PEERS, "other"], model, python="/no/python", progress=str)
    assert not peers
    assert missing.keys() == {*PEERS, "other"}
    assert "/no/python does not run" in missing["llama.cpp"]
    assert "llama.cpp, transformers, openvino" in missing["other"]


@pytest.mark.parametrize("module", ["llama_worker", "transformers_worker", "openvino_worker"])
def test_a_worker_imports_only_the_standard_library_and_its_engine(module: str) -> None:
    """Without site-packages nothing but the engine is missing."""
    command = module_command(sys.executable, f"slipstream.bench.peers.{module}")
    command[1:1] = ["-S"]
    engine = {"llama_worker": "llama_cpp", "transformers_worker": "torch"}
    with pytest.raises(PeerError, match=f"no module {engine.get(module, 'openvino_genai')}"):
        WorkerProcess(command)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "name",
    [
        "llama.cpp",
        pytest.param("transformers", marks=pytest.mark.slow),
        pytest.param("openvino", marks=pytest.mark.slow),
    ],
)
def test_a_real_peer_replies_plainly_and_with_lookup(name: str) -> None:
    """A stop token in the prompt ends nothing; one in the reply is its last."""
    if importlib.util.find_spec(MODULES[name]) is None:
        pytest.skip(f"{MODULES[name]} is not installed")
    prompt, stop = [1, 2, *range(400, 408), *range(400, 408)], 2
    peers, missing = open_peers([name], real_model(), progress=str)
    try:
        assert not missing
        assert len(peers) == (4 if name == "llama.cpp" else 2)
        for peer in peers:
            reply = peer.reply(prompt, 12, [stop])
            assert 0 < reply.first_s <= reply.seconds
            assert len(reply.token_ids) == 12 or reply.token_ids[-1] == stop
            assert stop not in reply.token_ids[:-1]
    finally:
        for peer in peers:
            peer.close()
