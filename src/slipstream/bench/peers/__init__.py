"""Peers: other engines that answer the same prompts in the same run.

Each is a worker process that sleeps until it is asked, so a benchmark can interleave engines that
would fight for the same cores. Prompts go in and replies come out as token ids of our tokenizer:
one counter for all. Every peer decodes greedily at the best setting that it has on this machine,
plain and with its own prompt lookup, and its clock is ours.

    peers, missing = open_peers(["llama.cpp"], Path("model.gguf"), progress=print)
    for peer in peers:
        peer.settle(prompt_ids, 64, stop_ids)
        print(peer.name, peer.reply(prompt_ids, 128, stop_ids).seconds)
        peer.close()

Workers import the standard library and their engine only, so `python` may be any interpreter, of
Python 3.10 or later, that has the engines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slipstream.bench.peers.engines import Opening, open_llama, open_openvino, open_transformers
from slipstream.bench.peers.peer import Peer, PeerReply
from slipstream.bench.peers.process import PeerError

__all__ = ["PEERS", "Peer", "PeerError", "PeerReply", "open_peers"]

_OPENERS: dict[str, Callable[[Opening, dict[str, str]], Iterator[Peer]]] = {
    "llama.cpp": open_llama,
    "transformers": open_transformers,
    "openvino": open_openvino,
}
PEERS: tuple[str, ...] = tuple(_OPENERS)


def open_peers(
    names: Sequence[str],
    model: Path,
    *,
    python: str = sys.executable,
    progress: Callable[[str], None],
) -> tuple[list[Peer], dict[str, str]]:
    """Start the named peers on a model file. A peer's fault never raises.

    Args:
        names: some of `PEERS`.
        model: a GGUF file.
        python: the interpreter that has the engines.
        progress: told what is being started, since some take many seconds.

    Returns:
        The peers, each to be closed, and for each that is missing the reason in words.
    """
    peers: list[Peer] = []
    missing: dict[str, str] = {}
    for name in dict.fromkeys(names):
        if name not in _OPENERS:
            missing[name] = f"no such peer; there are {', '.join(PEERS)}"
            continue
        if model.is_dir():
            missing[name] = f"peers are compared on a GGUF file, got the folder {model.name}"
            continue
        opening = Opening(model=model.resolve(), python=python, progress=progress)
        try:
            peers.extend(_OPENERS[name](opening, missing))
        except PeerError as error:
            missing[name] = str(error)
    return peers, missing
