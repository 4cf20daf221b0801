"""From a model's name to an engine: open the file, choose a back end, compile, choose a drafter."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config import EngineConfig, is_path, may_name_model
from slipstream.drafters.checkpoints import shipped_assistant
from slipstream.drafters.ngram import NGramDrafter
from slipstream.engine.budget import RowBudget
from slipstream.engine.calibrate import (
    best_of,
    calibrate,
    idle_forwards,
    room,
    row_counts,
    teach_drafts,
    time_drafts,
    time_reading,
    time_rows,
)
from slipstream.engine.draft_model import DraftSource, draft_source
from slipstream.engine.engine import Engine
from slipstream.engine.identity import assistant_key, profile_folder, profile_key
from slipstream.engine.pairing import MakeDrafter, Pairing
from slipstream.engine.target import Target, build_target
from slipstream.errors import ConfigError, LoadError
from slipstream.kernels.cuda.device import has_device
from slipstream.kernels.ops import Backend
from slipstream.models.arch import Arch
from slipstream.models.head import HeadCheckpoint
from slipstream.models.loading import ModelFile, open_model, resolve_model
from slipstream.models.loading.heads import is_assistant, read_head
from slipstream.models.loading.names import cache_dir
from slipstream.policy.profile import load_profile, passes_sentinel

_log = logging.getLogger(__name__)


def load(
    model: str | os.PathLike[str], config: EngineConfig | None = None, **overrides: Any
) -> Engine:
    """Load a model and return an engine that serves it.

    Args:
        model: name of a pulled model, path of a GGUF file or of a folder, or a hub id.
        config: settings; by default those of the environment.
        overrides: single settings that go before both, e.g. `drafter="none"`.

    Raises:
        LoadError: the model or its drafter cannot be found, opened or served.
        MismatchError: the drafter was made for another model.
        ConfigError: a setting is unknown, out of range or does not suit the model.
    """
    started = time.perf_counter()
    if config is not None:
        overrides = dataclasses.asdict(config) | overrides
    config = EngineConfig.from_env(None if config is None else {}, **overrides)
    file = open_model(resolve_model(os.fspath(model)), quantize=config.quantize)
    backend = choose_backend(config)
    paid = choose_paid(config, file, backend)
    target = build_target(
        file.arch, backend, file.load_weights, config, assistant=paid.assistant, draft=paid.draft
    )
    pairing = Pairing.fresh(config, choose_drafters(config, target))
    learn(pairing, target, config, file.fingerprint, paid=paid.key)
    return Engine(
        target,
        file.tokenizer,
        template=file.template,
        config=config,
        pairing=pairing,
        load_s=time.perf_counter() - started,
    )


def learn(
    pairing: Pairing, target: Target, config: EngineConfig, fingerprint: str, *, paid: str = ""
) -> None:
    """Give a pairing's policy its first costs: those of its profile if they still hold, else timed.

    Args:
        fingerprint: tells model files apart.
        paid: tells paid drafters apart, "" for none.
    """
    policy = pairing.policy
    if policy is None:
        return
    budget = RowBudget.of(config, target.arch.vocab_size)
    widest = room(target, budget)
    if config.profile == "on":
        pairing.folder = profile_folder()
        pairing.key = profile_key(target.backend, fingerprint, config, paid=paid)
    counts = row_counts(policy, config.max_num_seqs, widest)
    with idle_forwards(target, budget, max(counts)) as forwards:
        if pairing.folder is not None and pairing.key is not None:
            found = load_profile(pairing.folder, pairing.key, policy)
            if found and passes_sentinel(policy, partial(best_of, forwards)):
                pairing.profile = f"read: {pairing.path}"
                return
            if found:  # what it says of time is wrong, what it says of text and debt is not
                policy.forget_costs()
                pairing.doubted_costs = None if found.doubted else found.costs
        if getattr(target.step, "captures", False):
            for count in counts:  # a first run is launched kernel by kernel, then captured
                forwards(count)
        timed = time_rows(forwards, counts)
        drafts_s = {} if target.head is None else time_drafts(forwards, target.head, policy.max_k)
    calibrate(policy, timed, 0)
    if target.head is not None:
        reading_s = time_reading(target.head, drafts_s.get(1, 0.0))
        teach_drafts(policy.cost.drafting, drafts_s, reading_s)
    where = "kept nowhere" if pairing.path is None else f"to be kept in {pairing.path}"
    what = "new" if pairing.doubted_costs is None else "set aside, its times did not hold"
    pairing.profile = f"{what}: {len(timed)} row counts timed at load, {where}"


def choose_backend(config: EngineConfig) -> Backend:
    """Return the back end that a config asks for.

    "auto" is cuda where there is a GPU that serves, else the cpu; where the compiled kernels are
    missing, the reference serves in their place. One line in the log says why something slower
    than what the machine has was taken.

    Raises:
        LoadError: cuda or the cpu is asked for by name and cannot serve, or the reference is needed
            and torch is not installed.
    """
    if config.device == "reference":
        return _reference("asked for")
    if config.device == "cuda":
        return _cuda(config)
    if config.device == "auto" and has_device():
        try:
            return _cuda(config)
        except LoadError as error:
            _log.warning("the GPU is not used: %s", error)
    try:
        from slipstream.kernels.cpu import CpuBackend
    except ImportError as error:
        if config.device == "cpu":
            raise LoadError(
                f"the compiled cpu kernels are missing: {error}",
                hint="install with a C++17 compiler, or use device auto or reference",
            ) from error
        _log.warning("the compiled cpu kernels are missing, the slow reference serves: %s", error)
        return _reference("the compiled cpu kernels are missing")
    backend: Backend = CpuBackend(
        threads=config.threads, isa=config.isa, kernel=config.verify_kernel
    )
    return backend


class Paid(NamedTuple):
    """The drafter that a config asks for besides lookups: one of the two at most.

    Attributes:
        key: tells drafters apart, "" for none.
    """

    assistant: HeadCheckpoint | None = None
    draft: DraftSource | None = None
    key: str = ""


def choose_paid(config: EngineConfig, file: ModelFile, backend: Backend) -> Paid:
    """Return the drafter that a config asks for besides lookups, opened and checked.

    Args:
        file: the target.

    Raises:
        LoadError: there is none of that name, it cannot be read, or the back end does not serve it.
        MismatchError: it was made for another target, or speaks of other tokens.
    """
    named = config.paid_drafter
    if may_name_model(named) and not is_assistant(Path(named)):
        draft = open_model(resolve_model(named))
        return Paid(draft=draft_source(file, draft), key=f"draft {draft.fingerprint}")
    assistant, key = choose_assistant(config, file.arch, file.fingerprint, backend)
    return Paid(assistant=assistant, key=key)


def choose_assistant(
    config: EngineConfig, arch: Arch, fingerprint: str, backend: Backend
) -> tuple[HeadCheckpoint | None, str]:
    """Return the assistant that a config asks for, None for none, and what tells it apart.

    "auto" takes the one that is shipped for the target, but on the reference, which is slow as it
    is. One that is damaged is no reason not to start then: one line in the log says so.

    Args:
        fingerprint: the target's.

    Raises:
        LoadError: no assistant is shipped for the target, or it cannot be read.
        MismatchError: it was made for another target.
    """
    named = config.paid_drafter
    is_auto = named == "auto"
    if is_auto and backend.name == "reference":
        return None, ""
    if named in ("auto", "assistant"):
        folder = shipped_assistant(fingerprint)
        if folder is None and not is_auto:
            raise LoadError(
                "no assistant is shipped for this model",
                hint="name the folder of one as drafter, or use drafter ngram",
            )
    else:
        folder = Path(named) if is_path(named) else None
    if folder is None:
        return None, ""
    try:
        return read_head(folder, arch, fingerprint), assistant_key(folder)
    except (LoadError, OSError) as error:
        if not is_auto:
            raise
        _log.warning("the assistant that is shipped for this model is not used: %s", error)
        return None, ""


def choose_drafters(config: EngineConfig, target: Target) -> list[MakeDrafter]:
    """Return what makes drafters for each request.

    "auto" is n-gram lookup, which is free, and the target's assistant where there is one; where
    there are two, each round drafts with the one that makes it faster.

    Raises:
        ConfigError: k asks for more than the drafter can propose.
    """
    if config.drafter == "none":
        return []
    head = target.head
    if head is None:
        return [NGramDrafter]
    if config.uses_ngram:
        return [NGramDrafter, head.drafter]
    if isinstance(config.k, int) and config.k > head.max_k:
        raise ConfigError(f"k must be in [0, {head.max_k}] with this drafter, got {config.k}")
    return [head.drafter]


def _cuda(config: EngineConfig) -> Backend:
    try:
        from slipstream.kernels.cuda.backend import CudaBackend
    except ImportError as error:
        raise LoadError(
            f"the cuda back end needs torch with CUDA: {error}",
            hint="pip install 'slipstream[cuda]'",
        ) from error
    backend: Backend = CudaBackend(
        kernel=config.verify_kernel, tile_m=config.tile_m, cache=cache_dir() / "kernels"
    )
    return backend


def _reference(reason: str) -> Backend:
    try:
        from slipstream.kernels.reference import ReferenceBackend
    except ImportError as error:
        raise LoadError(
            f"the reference back end needs torch: {error}", hint="pip install torch"
        ) from error
    return ReferenceBackend(reason=reason)
