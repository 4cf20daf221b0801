"""One benchmark from start to end: load, refuse what misleads, warm up, run, sum up."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.bench.arms import Variant, arms_of
from slipstream.bench.model import Model
from slipstream.bench.peers import Peer, open_peers
from slipstream.bench.plan import Limits, groups_of, left_over
from slipstream.bench.provenance import provenance
from slipstream.bench.record import Bound, Setup, record
from slipstream.bench.refuse import Misleading, misleading
from slipstream.bench.run import Bench, Progress, Run
from slipstream.bench.scripts import Scripts
from slipstream.bench.summary import Row, Trials
from slipstream.bench.synthetic import PREFIX as RANDOM
from slipstream.bench.synthetic import Synthetic
from slipstream.bench.workload import OVERALL, Workload
from slipstream.config import EngineConfig
from slipstream.drafters.scripted import PREFIX, ScriptedSpec
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.kernels.bandwidth import bandwidth_of
from slipstream.kernels.ops import PAGE_SIZE
from slipstream.models.loading import resolve_model
from slipstream.types import KSetting

BANDWIDTH_REPEATS = 3
# A peer this many times slower than its own best setting was disturbed.
STRAYED = 1.5
# Load at which half a core was taken before the run began.
BUSY = 0.5
# A classic step so many times longer or shorter than its forward was timed spoils predictions.
MISTIMED = 1.3


class MisleadingError(ConfigError):
    """What was asked for would mislead; `warnings` says how."""

    def __init__(self, warnings: Sequence[Misleading]) -> None:
        more = f" (and {len(warnings) - 1} more reasons)" if len(warnings) > 1 else ""
        super().__init__(
            f"this would mislead: {warnings[0].text}{more}",
            hint="change the workload or the limits; --allow-misleading runs it all the same, "
            "marked as such",
        )
        self.warnings = list(warnings)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a benchmark is asked to do.

    Attributes:
        drafter: auto, ngram, assistant, the path of one, a draft model, or
            scripted:RATE[,RATE...][@SEED].
        allow_misleading: run what misleads, and say so.
        peers: other engines to start, run by `peer_python`.
    """

    model: str
    config: EngineConfig
    k_values: Sequence[KSetting]
    variants: Sequence[Variant]
    workload: Workload
    limits: Limits
    drafter: str = "auto"
    allow_misleading: bool = False
    peers: Sequence[str] = ()
    peer_python: str = sys.executable


@dataclass(kw_only=True)
class Result:
    """What came out."""

    setup: Setup
    run: Run
    trials: Trials
    rows: list[Row] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return record(self.setup, self.run, self.trials, self.rows)


def benchmark(plan: Plan, progress: Progress, announce: Callable[[str], None]) -> Result:
    """Run a benchmark.

    Args:
        progress: told what is being done and how much of it is.
        announce: told the physical bound and what was found misleading, before anything is run.

    Raises:
        MisleadingError: the numbers would mislead, and that is not allowed.
        ConfigError, LoadError: something asked for cannot be had.
    """
    random = _random_of(plan)
    path = None if random else Path(resolve_model(plan.model))
    spec = ScriptedSpec.parse(plan.drafter) if plan.drafter.startswith(PREFIX) else None
    num_seqs = max(plan.config.max_num_seqs, *plan.limits.batches)
    config = dataclasses.replace(
        plan.config,
        max_num_seqs=num_seqs,
        prefix_cache="on",
        k="auto",
        drafter="none" if spec else plan.drafter,
    )
    began = time.perf_counter()
    made = provenance(path or plan.model)
    progress("loading", 0.0)
    models = {}
    for variant in plan.variants:
        settings = dataclasses.asdict(variant)
        if random is not None:
            models[variant] = random.model(config, **settings)
        elif path is not None:
            models[variant] = Model.load(path, config, **settings)
    model = next(iter(models.values()))
    progress("loading", 1.0)
    warnings = misleading(plan.workload, model, plan.limits, judge_text=random is None)
    if warnings and not plan.allow_misleading:
        raise MisleadingError(warnings)
    bandwidth, how = bandwidth_of(model.target.backend, BANDWIDTH_REPEATS)
    bound = Bound(weight_bytes=model.target.weight_bytes, bandwidth=bandwidth, how=how)
    announce(str(bound))
    lengths = [len(model.ids(asked.turns[0])) for asked in plan.workload.conversations]
    context_len = int(median(lengths)) + plan.limits.max_tokens // 2
    scripts = Scripts()
    vocab_size = model.target.arch.vocab_size
    peers: list[Peer] = []
    try:
        peers, failed = open_peers(
            plan.peers,
            path or Path(plan.model),
            python=plan.peer_python,
            progress=lambda text: progress(text, 0.0),
        )
        for name, reason in failed.items():
            announce(f"missing: {name}: {reason}")
        bench = Bench(
            models,
            arms_of(plan.k_values, plan.variants),
            None if spec is None else scripts.maker(spec, vocab_size),
            scripts,
            peers,
            context_len,
        )
        bench.warm_up(plan.limits, progress)
        groups = groups_of(plan.workload, plan.limits.batches)
        run = bench.run(groups, plan.limits, progress, began)
    finally:
        for peer in peers:
            peer.close()
    times_s = {variant.name: own.usual_s for variant, own in models.items()}
    # A machine that was busy at the start would make the bound look reached: the better one counts.
    again, how_again = bandwidth_of(model.target.backend, BANDWIDTH_REPEATS)
    if again > bound.bandwidth:
        bound = dataclasses.replace(bound, bandwidth=again, how=how_again)
    run.failed = failed | run.failed
    run.notes[:0] = left_over(plan.workload, plan.limits.batches)
    if num_seqs > plan.config.max_num_seqs:
        run.notes.append(f"max_num_seqs was raised to {num_seqs} for the widest batch")
    run.notes += _strays(run, peers)
    if random is not None:
        run.notes.append("random weights: costs are a trained model's, acceptance is scripted")
    if made["load_average"] >= BUSY:
        run.notes.append(
            f"the load average was {made['load_average']} at the start: the cores were in use"
        )
    if not run.trials:
        raise SlipstreamError(
            "nothing was run", hint=run.notes[-1] if run.notes else "the workload is empty"
        )
    setup = Setup(
        provenance=made,
        config=dataclasses.replace(model.engine.config, k="auto"),
        backend={
            "name": model.target.backend.name,
            "reason": model.target.backend.reason,
            "threads": getattr(model.target.backend, "threads", None),
            "isa": getattr(model.target.backend, "isa", None),
            "max_model_len": model.target.max_model_len,
            "kv_tokens": model.target.kv.num_pages * PAGE_SIZE,
        },
        drafter=_drafts_of(model, plan.drafter),
        workload=plan.workload,
        limits=plan.limits,
        bound=bound,
        times_s=times_s,
        context_len=context_len,
        warnings=warnings,
        peers={peer.name: peer.facts for peer in peers},
    )
    trials = Trials(run, times_s)
    rows = trials.rows()
    run.notes += _mistimed(rows, times_s)
    return Result(setup=setup, run=run, trials=trials, rows=rows)


def _drafts_of(model: Model, asked: str) -> str:
    """Return what reports call the drafts: the drafters' names, or what is scripted."""
    if asked.startswith(PREFIX):
        return asked
    return "+".join(make_drafter().name for make_drafter in model.make_drafters)


def _random_of(plan: Plan) -> Synthetic | None:
    """Return the random weights that are asked for, if any.

    Raises:
        ConfigError: there is no such shape, or something depends on what the model says.
    """
    if not plan.model.startswith(RANDOM):
        return None
    if not plan.drafter.startswith(PREFIX):
        raise ConfigError(
            f"random weights accept no real drafter's tokens, got --drafter {plan.drafter}",
            hint=f"use {PREFIX}RATE, e.g. {PREFIX}0.56",
        )
    if plan.peers:
        raise ConfigError(f"no other engine has the model {plan.model}, got --peers")
    return Synthetic(plan.model)


def _mistimed(rows: Sequence[Row], times_s: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Return, in words, whose forwards took another time in the run than before it."""
    notes = []
    for row in rows:
        timed_ms = 1e3 * times_s.get(row.variant, {}).get(1, 0.0)
        if row.category != OVERALL or row.batch > 1 or row.requested_k != 0 or not row.classic_ms:
            continue
        if timed_ms and not 1 / MISTIMED < row.classic_ms / timed_ms < MISTIMED:
            notes.append(
                f"{row.variant}: a row was timed at {timed_ms:.2f} ms before the run and a classic "
                f"step took {row.classic_ms:.2f} in it: predictions are off"
            )
    return notes


def _strays(run: Run, peers: Sequence[Peer]) -> list[str]:
    """Return, in words, which peers ran much slower than when their setting was found."""
    notes = []
    for peer in peers:
        index = next(i for i, arm in enumerate(run.arms) if arm.peer == peer.name)
        own = [trial for trial in run.trials if trial.arm == index]
        settled = min((one["token_s"] for one in peer.facts.get("tried", [])), default=0.0)
        tokens = sum(trial.tokens for trial in own)
        pace = sum(trial.seconds for trial in own) / tokens if tokens else 0.0
        if settled and pace > STRAYED * settled:
            notes.append(
                f"{peer.name} took {1e3 * pace:.1f} ms a token in the run and "
                f"{1e3 * settled:.1f} when its setting was found: something else used the cores"
            )
    return notes
