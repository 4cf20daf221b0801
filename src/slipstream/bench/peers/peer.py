"""One other engine, loaded and at its best setting, that answers prompts of token ids.

What is best is measured, not guessed: `settle` tries every setting of the peer (threads, attention
kernel, dtype, lookup width) on one prompt in turn, so that a drift of the machine hits all of them,
drops what is far behind and repeats the rest. Several peers may share a worker process, which then
has one model in memory for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.bench.peers.process import PeerError, WorkerProcess

WARM_TOKENS = 4  # enough to touch every kernel of a setting once before its clock counts
ROUNDS = 4
SCAN_ROUNDS = 2  # of all settings; then those that are far behind are left out
FAR_BEHIND = 1.3  # times the fastest of these rounds: not the best, whatever the noise
PAUSE_S = 0.02  # threads spin for some milliseconds after their work
REPLY_S = 60.0  # deadline of a reply, and what each of its tokens adds: slower is not usable
TOKEN_S = 2.0

Options = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PeerReply:
    """A greedy reply, timed by the clock of the calling process from before the request.

    Attributes:
        token_ids: at most `max_tokens`; a stop token, if one ended the reply, is the last.
        first_s: seconds until the first token arrived.
        seconds: seconds until the last one arrived.
    """

    token_ids: list[int]
    first_s: float
    seconds: float


class Peer:
    """A loaded engine in a worker process of its own, at its best setting.

    Args:
        name: what a table calls it.
        process: the worker, whose `reply` takes the options as keyword arguments.
        settings: the options to try; the first is used until `settle`.
        facts: version, file and settings, for provenance.
        sharing: the open peers of the same process, to which this one is added.
    """

    def __init__(
        self,
        name: str,
        process: WorkerProcess,
        settings: Sequence[Options],
        facts: dict[str, Any],
        sharing: list[Peer],
    ) -> None:
        self.name = name
        self._process = process
        self._settings = list(settings)
        self._sharing = sharing
        sharing.append(self)
        self.facts: dict[str, Any] = {**facts, **self._settings[0]}

    def settle(self, token_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> None:
        """Try every setting on a prompt and keep the fastest in decoding, by seconds a token.

        Notes what was tried in `facts["tried"]`. A setting that the engine refuses is left out.

        Raises:
            PeerError: the worker is gone, or no setting works.
        """
        tried: list[tuple[Options, list[float]]] = []
        refused = "it has no settings"
        for options in self._settings:
            try:
                self._timed(options, token_ids, min(WARM_TOKENS, max_tokens), stop_ids)
                tried.append((options, []))
            except PeerError as error:
                refused = str(error)
                if not self._process.is_open:
                    raise
        if not tried:
            raise PeerError(refused)
        running = tried
        for round_index in range(ROUNDS):
            for options, seconds in running:
                reply = self._timed(options, token_ids, max_tokens, stop_ids)
                decoded = max(1, len(reply.token_ids) - 1)
                seconds.append((reply.seconds - reply.first_s) / decoded)
            if round_index + 1 == SCAN_ROUNDS:
                limit = FAR_BEHIND * min(min(seconds) for _, seconds in tried)
                running = [setting for setting in tried if min(setting[1]) <= limit]
        best, _ = min(running, key=lambda setting: min(setting[1]))
        self._settings = [best]
        self.facts |= best
        self.facts["tried"] = [{**options, "token_s": min(seconds)} for options, seconds in tried]
        self._forget()

    def reply(
        self, token_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]
    ) -> PeerReply:
        """Answer a prompt greedily; the whole prompt is computed, whatever was asked before.

        Raises:
            PeerError: the engine refuses the prompt, or the worker is gone.
        """
        return self._reply(self._settings[0], token_ids, max_tokens, stop_ids)

    def close(self) -> None:
        """End the worker, if no other open peer shares it; a second call does nothing."""
        if self in self._sharing:
            self._sharing.remove(self)
            if not self._sharing:
                self._process.close()

    def _timed(
        self, options: Options, token_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]
    ) -> PeerReply:
        time.sleep(PAUSE_S)
        return self._reply(options, token_ids, max_tokens, stop_ids)

    def _reply(
        self, options: Options, token_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]
    ) -> PeerReply:
        # What a setting needs is loaded by a request of its own, so the reply's clock misses it.
        self._process.ask("prepare", length=len(token_ids) + max_tokens, **options)
        answer = self._process.ask(
            "reply",
            deadline_s=REPLY_S + TOKEN_S * (len(token_ids) + max_tokens),
            token_ids=list(token_ids),
            max_tokens=max_tokens,
            stop_ids=sorted(stop_ids),
            **options,
        )
        ids, first_s = answer.get("token_ids"), answer.get("first_s")
        if not isinstance(ids, list) or first_s is None or not 0 < len(ids) <= max_tokens:
            raise PeerError(f"{self.name} answered without a first token, or with a wrong number")
        return PeerReply(token_ids=ids, first_s=first_s, seconds=answer["elapsed"])

    def _forget(self) -> None:
        """Let the worker drop what no setting of its peers needs any more."""
        settings = [options for peer in self._sharing for options in peer._settings]
        self._process.ask("keep", options=settings)
