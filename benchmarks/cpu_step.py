"""CPU forward: Slipstream against llama.cpp at its best, same machine, same run.

Prints the bound first (bytes that a step must read over the bandwidth measured in this run), then
whole-step time by rows, classic decode, prefill, memory and start-up, and one JSON line last.

Method: each side is a loaded process that sleeps while others run. Every side tries its threads
(1 and all cores) and llama.cpp also flash attention and ubatch; a scan keeps two contenders, which
are timed in interleaved trials of alternating order; the better median counts. llama.cpp runs the
same file and its own Q4_0 requantisation of it, which it repacks for wide vectors. Classic decode
is (128 - 16) tokens / (t(128) - t(16)) on this process's clock, so neither side's own account of
its time is trusted. Other work on the machine spoils the numbers; its load average is printed.

    python benchmarks/cpu_step.py --llama-python PATH --bars --json FILE

Exit code: 0; 1 if a check fails (tokens, row invariance), our side fails, or `--bars` and one is
missed; 2 for bad usage. A peer that is missing or fails is a row saying so.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import (
    BAR_ROW_COUNTS,
    CONTEXT,
    KIND_CONTEXT,
    ROW_COUNTS,
    Prompts,
    check_invariance,
    decode_seconds,
    first_token_seconds,
    prefill_seconds,
    start_up,
    step_seconds,
)
from provenance import DEFAULT_MODEL, find_model, provenance, sample_text
from report import bars, print_bars, print_report
from sides import (
    OURS,
    Q4_0,
    SAME_FILE,
    Contender,
    Measure,
    SideError,
    compete,
    llama,
    noting_failure,
    num_cores,
    ours,
)

from slipstream.kernels.bandwidth import read_bandwidth

UBATCHES = (128, 256, 512)


def main() -> int:
    """Run the benchmark and return the exit code."""
    args = _arguments()
    try:
        model = find_model(args.model)
    except Exception as error:
        print(f"cpu_step: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        result = run(model, args, Path(folder))
    print_report(result)
    if args.bars:
        print_bars(result["bars"])
    line = json.dumps(result)
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    failed = [name for name, passed in result["checks"].items() if not passed]
    missed = [bar["name"] for bar in result["bars"] if not bar["passed"]]
    return 1 if failed or OURS in result["missing"] or (args.bars and missed) else 0


def run(model: Path, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything and return the JSON object."""
    result: dict[str, Any] = {"schema": "cpu_step/1", "provenance": provenance(model)}
    result["bandwidth_bytes_per_s"], result["reader"] = read_bandwidth(3 if args.quick else 5)
    missing: dict[str, str] = {}
    field = _start_ours(model, result, missing)
    files = _start_llama(model, args.llama_python, folder, field, result, missing)
    result["missing"], result["trials"] = missing, args.trials
    if field:
        prompts = _prompts(field, result)
        result["checks"] = check_invariance(field.get(OURS, []), prompts) | result.pop("checks")
        _compete_all(field, prompts, args, result)
    else:
        result["checks"] = {}
    for contenders in field.values():
        for side in {id(c.side): c.side for c in contenders}.values():
            side.close()
    _start_ups(files, args, field, result)
    result["bars"] = bars(result)
    return result


def _start_ours(
    model: Path, result: dict[str, Any], missing: dict[str, str]
) -> dict[str, list[Contender]]:
    contenders = []
    try:
        for threads in _thread_counts():
            side = ours()
            result["ours"] = side.ask("load", path=str(model), threads=threads)
            result["provenance"] |= {"slipstream": side.facts["slipstream"]}
            contenders.append(Contender(side=side, label=f"{threads}t"))
    except SideError as error:
        missing[OURS] = str(error)
        return {}
    return {OURS: contenders}


def _start_llama(
    model: Path,
    python: str,
    folder: Path,
    field: dict[str, list[Contender]],
    result: dict[str, Any],
    missing: dict[str, str],
) -> dict[str, tuple[Path, str]]:
    """Add llama.cpp's contenders to the field; return the file and interpreter of each side."""
    files = {OURS: (model, sys.executable)}
    requantised = folder / "q4_0.gguf"
    for name, path in ((SAME_FILE, model), (Q4_0, requantised)):
        try:
            side = llama(python)
            result["provenance"] |= {
                key: side.facts[key] for key in ("llama_cpp_python", "system_info")
            }
            if name == Q4_0:
                side.ask("quantize", source=str(model), target=str(path))
                result["q4_0_bytes"] = path.stat().st_size
            side.ask("load", path=str(path))
        except (SideError, OSError) as error:
            missing[name] = str(error)
            continue
        files[name] = (path, python)
        field[name] = [
            Contender(
                side=side,
                label=f"{threads}t fa={flash} ub={ubatch}",
                options={"threads": threads, "variant": (flash, ubatch)},
            )
            for threads in _thread_counts()
            for flash in (0, 1)
            for ubatch in UBATCHES
        ]
    return files


def _prompts(field: dict[str, list[Contender]], result: dict[str, Any]) -> Prompts:
    """Tokenize the text with one side, and check the others against it."""
    sides = {name: contenders[0].side for name, contenders in field.items()}
    ids = {
        name: side.ask("tokenize", text=sample_text())["token_ids"] for name, side in sides.items()
    }
    first = next(iter(ids.values()))
    result["checks"] = {"same tokens on all sides": all(other == first for other in ids.values())}
    return Prompts(token_ids=first)


def _compete_all(
    field: dict[str, list[Contender]],
    prompts: Prompts,
    args: argparse.Namespace,
    result: dict[str, Any],
) -> None:
    """Time steps, decode and prefill; ubatch matters to prefill only."""
    narrow = {
        name: [c for c in contenders if c.options.get("variant", (0, 512))[1] == max(UBATCHES)]
        for name, contenders in field.items()
    }
    repeat = 5 if args.quick else 20
    result["context"], result["kind_context"] = CONTEXT, KIND_CONTEXT
    if OURS in field:
        result["kv_bytes"] = result["ours"]["kv_bytes_a_position"] * CONTEXT
        bytes_read = result["ours"]["weight_bytes"] + result["kv_bytes"]
        result["bound_s"] = bytes_read / result["bandwidth_bytes_per_s"]

    def run(what: str, contenders: dict[str, list[Contender]], measure: Measure) -> dict[str, Any]:
        print(f"measuring {what}", file=sys.stderr)
        return _plain(compete(contenders, measure, args.trials, result["missing"]))

    for key, context, row_counts in (
        ("steps", CONTEXT, ROW_COUNTS),
        ("kind_steps", KIND_CONTEXT, BAR_ROW_COUNTS),
    ):
        result[key] = {
            rows: run(f"T({rows})", narrow, step_seconds(prompts, context, rows, repeat))
            for rows in row_counts
        }
    result["decode"] = run("classic decode", narrow, decode_seconds(prompts))
    result["prefill"] = run("prefill", field, prefill_seconds(prompts))


def _plain(timings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {
            "median_s": timing.median,
            "min_s": min(timing.trials),
            "max_s": max(timing.trials),
            "trials": timing.trials,
            "with": timing.label,
        }
        for name, timing in timings.items()
    }


def _start_ups(
    files: dict[str, tuple[Path, str]],
    args: argparse.Namespace,
    field: dict[str, list[Contender]],
    result: dict[str, Any],
) -> None:
    """Measure memory and load of fresh processes, and our command's first token."""
    result["start_up"] = {}
    print("measuring start-up", file=sys.stderr)
    for name, (path, python) in files.items():
        if name not in field or name in result["missing"]:
            continue
        start: Any = ours if name == OURS else functools.partial(llama, python)
        with noting_failure(name, result["missing"]):
            result["start_up"][name] = start_up(start, path, args.trials, is_ours=name == OURS)
            if name == OURS:
                trials = [first_token_seconds(path) for _ in range(args.trials)]
                result["first_token"] = {"median_s": statistics.median(trials), "trials": trials}


def _thread_counts() -> list[int]:
    return sorted({1, num_cores()})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="pulled model's name, or a GGUF")
    parser.add_argument(
        "--llama-python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter that has llama-cpp-python [default: this one]",
    )
    parser.add_argument("--trials", type=int, metavar="N", help="interleaved trials [default: 7]")
    parser.add_argument("--quick", action="store_true", help="3 trials of fewer repeats")
    parser.add_argument("--bars", action="store_true", help="print the bars; exit 1 on a miss")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON line there too")
    args = parser.parse_args()
    if args.trials is None:
        args.trials = 3 if args.quick else 7
    if args.trials < 1:
        parser.error(f"--trials must be >= 1, got {args.trials}")
    return args


if __name__ == "__main__":
    sys.exit(main())
