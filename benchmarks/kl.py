"""How far each side's next-token distributions are from the model in float32.

Mean KL(float32 || side) over 2,048 tokens of ordinary text, in windows that start from nothing,
for Slipstream's CPU back end and llama.cpp on the same file, in one run against one reference
(`float32_reference.py`: the same dequantised weights in plain float32). So the number holds what a
side's arithmetic adds (int8 activations, 16-bit KV), not what the quantisation cost.

    python benchmarks/kl.py --llama-python PATH

Exit code 1 if a side's mean exceeds `--limit` or its top-1 agreement is below 0.9 (it computes
another model), if the sides' tokens differ, or if our side fails. A missing peer is a row.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from float32_reference import float32_reference
from provenance import DEFAULT_MODEL, find_model, provenance, sample_text
from sides import OURS, SAME_FILE, Side, SideError, llama, ours

# Far above int8 activations (0.003 nats, 0.96 on SmolLM2), far below a wrong forward (whole nats).
MAX_MEAN_KL = 0.05
MIN_AGREEMENT = 0.9


def main() -> int:
    """Run the comparison and return the exit code."""
    args = _arguments()
    try:
        model = find_model(args.model)
    except Exception as error:
        print(f"kl: {error}", file=sys.stderr)
        return 1
    sides, missing = _start(model, args.llama_python, args.device)
    result: dict[str, Any] = {"schema": "kl/1", "provenance": provenance(model)}
    result |= {"window": args.window, "missing": missing, "sides": {}, "checks": {}}
    if sides:
        ids = {n: s.ask("tokenize", text=sample_text())["token_ids"] for n, s in sides.items()}
        token_ids = next(iter(ids.values()))[: args.tokens]
        result["tokens"] = len(token_ids)
        result["checks"]["same tokens on all sides"] = len({tuple(i) for i in ids.values()}) == 1
        result["sides"] = _compare(model, sides, token_ids, args.window)
    for side in sides.values():
        side.close()
    for name, row in result["sides"].items():
        passed = row["mean_kl"] <= args.limit and row["top1_agreement"] >= MIN_AGREEMENT
        result["checks"][f"{name} computes this model"] = passed
    if len(result["sides"]) == 2:
        mean = {name: row["mean_kl"] for name, row in result["sides"].items()}
        result["ratio"] = mean[OURS] / mean[SAME_FILE]
    _print(result)
    print(json.dumps(result))
    return 1 if OURS in missing or not all(result["checks"].values()) else 0


def _start(model: Path, python: str, device: str) -> tuple[dict[str, Side], dict[str, str]]:
    sides: dict[str, Side] = {}
    missing: dict[str, str] = {}
    for name in (OURS, SAME_FILE):
        try:
            side = ours() if name == OURS else llama(python)
            options = {"device": device} if name == OURS else {}
            side.ask("load", path=str(model), **options)
            sides[name] = side
        except (SideError, OSError) as error:
            missing[name] = str(error)
    return sides, missing


def _compare(
    model: Path, sides: dict[str, Side], token_ids: list[int], window: int
) -> dict[str, dict[str, float]]:
    """Return each side's statistics over all windows."""
    reference = float32_reference(model)
    divergence: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in sides}
    same_top: dict[str, list[npt.NDArray[np.bool_]]] = {name: [] for name in sides}
    worst: dict[str, float] = dict.fromkeys(sides, 0.0)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        path = Path(folder) / "logits.npy"
        for start in range(0, len(token_ids), window):
            chunk = token_ids[start : start + window]
            truth = reference(chunk)
            for name, side in sides.items():
                side.ask("logits", token_ids=chunk, path=str(path))
                logits = np.load(path)
                divergence[name].append(kl(truth, logits))
                worst[name] = max(worst[name], float(np.abs(truth - logits).max()))
                same_top[name].append(truth.argmax(axis=1) == logits.argmax(axis=1))
    return {
        name: {
            "mean_kl": float(np.concatenate(divergence[name]).mean()),
            "median_kl": float(np.median(np.concatenate(divergence[name]))),
            "max_kl": float(np.concatenate(divergence[name]).max()),
            "max_logit_error": worst[name],
            "top1_agreement": float(np.concatenate(same_top[name]).mean()),
        }
        for name in sides
    }


def kl(truth: npt.NDArray[np.float32], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return KL(truth || logits) in nats, float64 of shape (R,), from logits of shape (R, V)."""
    values = np.empty(len(truth))
    for row, (p_logits, q_logits) in enumerate(zip(truth, logits, strict=True)):
        log_p, log_q = _log_softmax(p_logits), _log_softmax(q_logits)
        values[row] = np.exp(log_p) @ (log_p - log_q)
    return values


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def _print(result: dict[str, Any]) -> None:
    p = result["provenance"]
    print(f"model     {p['model']}, sha256 {p['model_sha256']}; commit {p['commit']}")
    for name, reason in result["missing"].items():
        print(f"missing: {name}: {reason}")
    if result["sides"]:
        print(f"KL(float32 || side) in nats, {result['tokens']} tokens, window {result['window']}")
    for name, row in result["sides"].items():
        print(
            f"  {name:<24}mean {row['mean_kl']:.2e}, median {row['median_kl']:.2e}, "
            f"max {row['max_kl']:.2e}, top-1 agreement {row['top1_agreement']:.4f}, "
            f"largest logit error {row['max_logit_error']:.2e}"
        )
    if "ratio" in result:
        print(f"  ours / llama.cpp: {result['ratio']:.3f} (below 1 is closer to float32)")
    for name, passed in result["checks"].items():
        print(f"check: {name}: {'pass' if passed else 'FAIL'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="pulled model's name, or a GGUF")
    parser.add_argument(
        "--llama-python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter that has llama-cpp-python [default: this one]",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "reference"), help="our side's")
    parser.add_argument("--tokens", type=int, default=2048, help="at most the text's 2,500")
    parser.add_argument("--window", type=int, default=512, help="tokens of one window, <= 512")
    parser.add_argument("--limit", type=float, default=MAX_MEAN_KL, help="mean that passes, nats")
    args = parser.parse_args()
    if not 1 <= args.window <= 512:
        parser.error(f"--window must be in [1, 512], got {args.window}")
    return args


if __name__ == "__main__":
    sys.exit(main())
