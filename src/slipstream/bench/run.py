"""Runs the arms over the groups: forth and back, on the same prompts, in one process.

Every group is answered by all arms in order and then in reverse (ABBA), so that a machine that
slows down or speeds up meanwhile does so for all of them alike. The first reply of classic decoding
is what every other one is compared with, and what a scripted drafter replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.bench.arms import Arm, Variant
from slipstream.bench.model import Model, rest
from slipstream.bench.peers import Peer, PeerError
from slipstream.bench.plan import Group, Limits
from slipstream.bench.scripts import Scripts
from slipstream.bench.trial import Trial, run_trial
from slipstream.bench.workload import Conversation
from slipstream.drafters.base import Drafter
from slipstream.engine.engine import Engine
from slipstream.engine.pages import pages_for
from slipstream.errors import RequestError
from slipstream.kernels.ops import PAGE_SIZE
from slipstream.types import KSetting, SamplingParams

Progress = Callable[[str, float], None]
# What every engine answers before anything counts.
WARM_UP = "Say something about the weather, then count to twenty."
WARM_UP_TOKENS = 48
# Tokens by which a peer's settings are compared; slow ones would take minutes for more.
SETTLE_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Where a reply differs from classic decoding's: ids are None behind the end of a reply."""

    arm: str
    group: str
    prompt: int
    position: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        return (
            f"{self.arm} differs from classic decoding in {self.group}, prompt {self.prompt + 1}: "
            f"token {self.position} must be {self.expected}, got {self.got}"
        )


@dataclass(kw_only=True)
class Run:
    """What was run.

    Attributes:
        arms: in the order in which they take turns, classic of the first variant first.
        trials: in the order in which they were run.
        failed: peers that failed, with what they said.
        notes: what a reader must know besides.
    """

    arms: list[Arm]
    groups: list[Group]
    trials: list[Trial] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def own_share(self) -> float:
        """What the bench itself took, as a share of our arms' decode time."""
        ours = [trial for trial in self.trials if not self.arms[trial.arm].peer]
        seconds = sum(trial.seconds for trial in ours)
        return sum(trial.own_s for trial in ours) / seconds if seconds else 0.0


class Bench:
    """The engines of every arm at every batch, and the runs over them.

    An arm learns in one batch nothing from another, so that rows do not hang together.

    Args:
        models: one of each variant.
        arms: classic of the first variant first.
        make_drafter: returns a fresh drafter for each reply, in place of those that models were
            loaded with; `scripts` is what it may replay.
        peers: engines of others, arms at batch 1.
        context_len: tokens that a prompt usually has, for the prediction of what rounds take.
    """

    def __init__(
        self,
        models: Mapping[Variant, Model],
        arms: Sequence[Arm],
        make_drafter: Callable[[], Drafter] | None,
        scripts: Scripts,
        peers: Sequence[Peer] = (),
        context_len: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert arms[0].is_classic, "classic decoding is the measure of everything"
        self._model = next(iter(models.values()))
        self._arms = [*arms, *(Arm(k=None, variant=None, peer=peer.name) for peer in peers)]
        self._models = models
        self._make_drafter = make_drafter
        self._engines: dict[tuple[int, int], Engine] = {}
        self._peers = {peer.name: peer for peer in peers}
        self._scripts = scripts
        self._context_len = context_len
        self._clock = clock
        self._failed: dict[str, str] = {}
        self._notes: list[str] = []
        self._said: dict[tuple[int, ...], list[int]] = {}  # classic decoding's first replies

    def warm_up(self, limits: Limits, progress: Progress) -> None:
        """Time widths and let every engine answer once; peers find their best settings."""
        for model in self._models.values():
            progress("timing forwards", 0.0)
            model.time_widths(max(limits.batches), self._context_len)
        engine = self._model.engine
        text = WARM_UP
        prompt = [{"role": "user", "content": text}] if engine.has_chat_template else text
        target = self._model.target
        room = min(target.max_model_len, target.kv.num_pages * PAGE_SIZE)
        new_tokens = min(WARM_UP_TOKENS, max(2, room // 2))
        ids = self._model.ids(prompt)[: max(1, room - new_tokens)]
        stops = sorted(engine.tokenizer.stop_ids)
        for number, arm in enumerate(self._arms):
            progress("warming up", number / len(self._arms))
            if not arm.peer:
                params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
                for batch in limits.batches:
                    trial = Trial(arm=number, group=0, turn=0)
                    run_trial(self._engine(number, batch), [ids], params, trial, self._clock)
                continue
            progress(f"best setting of {arm.name}", 0.0)
            try:
                self._peers[arm.peer].settle(ids, min(limits.max_tokens, SETTLE_TOKENS), stops)
            except PeerError as error:
                self._failed[arm.peer] = str(error)
        self._engines.clear()  # what they learned of this text is no part of any arm
        progress("warming up", 1.0)

    def run(
        self,
        groups: Sequence[Group],
        limits: Limits,
        progress: Progress,
        began: float | None = None,
    ) -> Run:
        """Answer groups until all are done, the time is over, or an output differs.

        Args:
            began: when the time began, by the clock of this bench; now if not given. One group is
                always run.
        """
        if not self._model.engine.has_chat_template and any(
            conversation.system for group in groups for conversation in group.conversations
        ):
            self._notes.append("the model has no chat template: system messages are left out")
        run = Run(arms=self._arms, groups=list(groups), failed=dict(self._failed))
        run.notes += self._notes
        answers: dict[Conversation, list[str]] = {}
        began = self._clock() if began is None else began
        for number, group in enumerate(groups):
            spent = self._clock() - began
            if spent > limits.seconds and run.trials:
                run.notes.append(
                    f"stopped at the time limit of {limits.seconds:.0f} s: "
                    f"{number} of {len(groups)} groups were run"
                )
                break
            progress("running", max(number / len(groups), spent / limits.seconds))
            if group.turn > len(answers.get(group.conversations[0], [])):
                run.notes.append(f"left out {group.name}: an earlier turn was left out")
                continue
            try:
                prompts = [
                    self._model.ids(self._prompt(group, index, answers))
                    for index in range(group.batch)
                ]
            except RequestError as error:  # e.g. a template that takes no system message
                run.notes.append(f"left out {group.name}: {error.message}")
                continue
            reason = self._does_not_fit(prompts, limits.max_tokens)
            if reason:
                run.notes.append(f"left out {group.name}: {reason}")
                continue
            first = self._run_group(run, number, prompts, limits.max_tokens)
            if run.mismatches:
                break
            if group.batch == 1:
                answers.setdefault(group.conversations[0], []).append(first.texts[0])
        progress("running", 1.0)
        return run

    def _does_not_fit(self, prompts: Sequence[list[int]], max_tokens: int) -> str:
        """Return why prompts cannot be answered side by side, "" if they can."""
        target = self._model.target
        lengths = [len(prompt) + max_tokens for prompt in prompts]
        if not all(prompts):
            return "a prompt has no tokens"
        if max(lengths) > target.max_model_len:
            return f"{max(lengths)} tokens do not fit the context of {target.max_model_len}"
        pages = sum(pages_for(length) for length in lengths)
        if pages > target.kv.num_pages:
            room = target.kv.num_pages * PAGE_SIZE
            return f"{pages * PAGE_SIZE} tokens do not fit the KV cache of {room} (kv_tokens)"
        return ""

    def _prompt(
        self, group: Group, index: int, answers: Mapping[Conversation, Sequence[str]]
    ) -> str | list[dict[str, str]]:
        """Return a conversation for the chat template, or its last turn for a model without one."""
        conversation = group.conversations[index]
        if not self._model.engine.has_chat_template:
            return conversation.turns[group.turn]
        return conversation.messages(group.turn, answers.get(conversation, [])[: group.turn])

    def _run_group(self, run: Run, number: int, prompts: list[list[int]], max_tokens: int) -> Trial:
        """Let all arms answer a group, forth and back; return classic decoding's first trial."""
        params = SamplingParams(max_tokens=max_tokens)
        self._read(prompts)
        order = [
            index
            for index, arm in enumerate(self._arms)
            if not arm.peer or (len(prompts) == 1 and arm.peer not in run.failed)
        ]
        first: Trial | None = None
        for place, index in enumerate([*order, *reversed(order)]):
            arm = self._arms[index]
            rest()
            trial = Trial(arm=index, group=number, turn=int(place >= len(order)))
            if not arm.peer:
                engine = self._engine(index, len(prompts))
                run_trial(engine, prompts, params, trial, self._clock)
            elif arm.peer in run.failed or not _ask_peer(
                self._peers[arm.peer], prompts[0], max_tokens, self._model, trial, run
            ):
                continue
            run.trials.append(trial)
            if first is None:
                first = trial
                self._scripts.set(prompts, trial.token_ids)
                run.mismatches += self._differs_alone(prompts, trial, run.groups[number])
            elif not arm.peer:
                run.mismatches += _differences(
                    first.token_ids, trial.token_ids, self._name(arm), run.groups[number]
                )
        assert first is not None
        return first

    def _name(self, arm: Arm) -> str:
        """Return what messages call an arm; its variant too, if there are several."""
        if arm.variant is None or len(self._models) == 1:
            return arm.name
        return f"{arm.name} ({arm.variant.name})"

    def _differs_alone(
        self, prompts: list[list[int]], trial: Trial, group: Group
    ) -> list[Mismatch]:
        """Return where classic replies differ from those to the same prompts in another batch."""
        known = [
            self._said.setdefault(tuple(prompt), ids)
            for prompt, ids in zip(prompts, trial.token_ids, strict=True)
        ]
        return _differences(known, trial.token_ids, self._name(self._arms[0]), group)

    def _read(self, prompts: list[list[int]]) -> None:
        """Read prompts into the cache of every model, so that all trials find them there alike."""
        for number, arm in enumerate(self._arms):
            if arm.is_classic:
                engine = self._engine(number, len(prompts))
                engine.generate(prompts, SamplingParams(max_tokens=1))

    def _engine(self, index: int, batch: int) -> Engine:
        """Return an arm's engine for a batch, made when it is asked for first."""
        engine = self._engines.get((index, batch))
        if engine is None:
            arm = self._arms[index]
            assert arm.variant is not None
            model = self._models[arm.variant]
            own = self._make_drafter
            makers = model.make_drafters if own is None else (own,)
            engine = model.make(*(() if arm.is_classic else makers), k=_setting(arm))
            self._engines[index, batch] = engine
        return engine


def _ask_peer(
    peer: Peer, prompt: list[int], max_tokens: int, model: Model, trial: Trial, run: Run
) -> bool:
    """Fill in a peer's trial; if it fails, note what it said and return False."""
    try:
        reply = peer.reply(prompt, max_tokens, sorted(model.tokenizer.stop_ids))
    except PeerError as error:
        run.failed[peer.name] = str(error)
        return False
    trial.token_ids = [list(reply.token_ids)]
    trial.tokens = len(reply.token_ids) - 1
    trial.prefill_s, trial.seconds = reply.first_s, reply.seconds - reply.first_s
    return True


def _differences(
    first: Sequence[list[int]], replies: Sequence[list[int]], arm: str, group: Group
) -> list[Mismatch]:
    """Return where replies differ first, one entry for each prompt that does."""
    out = []
    for prompt, (expected, got) in enumerate(zip(first, replies, strict=True)):
        if expected == got:
            continue
        length = min(len(expected), len(got))
        position = next((i for i in range(length) if expected[i] != got[i]), length)
        out.append(
            Mismatch(
                arm=arm,
                group=group.name,
                prompt=prompt,
                position=position,
                expected=expected[position] if position < len(expected) else None,
                got=got[position] if position < len(got) else None,
            )
        )
    return out


def _setting(arm: Arm) -> KSetting:
    return "off" if arm.k in (0, None) else arm.k
