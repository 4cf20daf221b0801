"""`slipstream info`: what this machine, and this model on it, will be run with.

Keys are one word each and stay; values may say more over time. `--json` prints the same as one
object.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream import __version__
from slipstream.cli.settings import MODEL_HELP, engine_config, with_engine_flags
from slipstream.cli.status import status

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.engine.engine import Engine
    from slipstream.engine.target import Target
    from slipstream.kernels.ops import Backend

Facts = dict[str, str | int | float | bool | None]

AUTO = "auto: every round is sized from what rounds and classic steps were measured to take"


@with_engine_flags
def info(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of lines.")
    ] = False,
    **settings: Any,
) -> None:
    """Print the back end and why.

    With MODEL also its memory in bytes, drafter, width and profile.
    """
    config = engine_config(settings)

    from slipstream.engine.load import choose_backend

    facts = (
        _machine(choose_backend(config), config) if model is None else _with_model(model, config)
    )
    if json_output:
        print(json.dumps(facts, allow_nan=False))
        return
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key:<{width}}  {_plain(value)}")


def _with_model(model: str, config: EngineConfig) -> Facts:
    """Load a model and return what there is to say about it."""
    from slipstream.engine.load import load
    from slipstream.models.loading import open_model, resolve_model

    with status(f"loading {model}"):
        file = open_model(resolve_model(model), quantize=config.quantize)
        engine = load(file.path, config)
    return {
        **_machine(engine.target.backend, config),
        "model": str(file.path),
        "name": file.name,
        "fingerprint": file.fingerprint,
        "chat_template": engine.has_chat_template,
        **_shape(engine.target),
        "max_num_seqs": config.max_num_seqs,
        **_memory(engine.target),
        **_pairing(engine),
        "load_s": round(engine.load_s, 3),
    }


def _machine(backend: Backend, config: EngineConfig) -> Facts:
    return {
        "version": __version__,
        "device": backend.name,
        "device_reason": f"{config.device}: {backend.reason}",
        # What only some back ends have.
        "isa": getattr(backend, "isa", None),
        "threads": getattr(backend, "threads", None),
        "usable_cores": _num_cores(),
    }


def _shape(target: Target) -> Facts:
    arch = target.arch
    return {
        "architecture": arch.family,
        "layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "vocabulary": arch.vocab_size,
        "trained_context": arch.context_len,
        "context": target.max_model_len,
    }


def _memory(target: Target) -> Facts:
    """Return the memory plan; on the cpu, KV pages become resident as they are written."""
    from slipstream.kernels.ops import PAGE_SIZE

    per_token = target.kv_token_bytes + target.draft_kv_token_bytes
    kv_tokens = target.kv.num_pages * PAGE_SIZE
    scratch_bytes = _scratch_bytes(target)
    return {
        "weights_bytes": target.weight_bytes,
        "drafter_bytes": target.head_bytes,
        "kv_bytes_per_token": per_token,
        "kv_bytes_per_context": per_token * target.max_model_len,
        "kv_tokens": kv_tokens,
        "kv_bytes": per_token * kv_tokens,
        "scratch_bytes": scratch_bytes,
        "total_bytes": target.weight_bytes
        + target.head_bytes
        + per_token * kv_tokens
        + (scratch_bytes or 0),
        "limit_bytes": None if target.plan is None else target.plan.limit_bytes,
    }


def _scratch_bytes(target: Target) -> int | None:
    """Return the bytes of activations and logits, None where the back end does not plan them."""
    if target.plan is not None:
        return target.plan.workspace_bytes
    step: Any = target.step
    if not hasattr(step, "program"):
        return None
    return int(step.program.scratch_bytes) + int(step.logits.nbytes)


def _pairing(engine: Engine) -> Facts:
    config, pairing = engine.config, engine.pairing
    drafters = [make_drafter() for make_drafter in pairing.make_drafters]
    name = "+".join(drafter.name for drafter in drafters) or "none"
    max_k = max((drafter.max_k for drafter in drafters), default=0)
    ceiling = min(config.k_ceiling, max_k)
    policy = pairing.policy_of(0, config.k, drafter=name, ceiling=ceiling)
    reason = policy.reason if pairing.policy is None or config.k != "auto" else AUTO
    return {
        "drafter": name,
        "drafter_max_k": max_k,
        "k": config.k,
        "k_reason": reason,
        "profile": pairing.profile,
    }


def _plain(value: str | int | float | bool | None) -> str:
    """Return a value as it stands in a line; a fact that does not apply is a dash."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _num_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
