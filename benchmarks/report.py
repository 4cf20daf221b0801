"""The cpu_step benchmark's tables and bars, from its JSON object."""

from __future__ import annotations

import math
from typing import Any

from measure import PREFILL
from sides import OURS, Q4_0, SAME_FILE

_WIDTH = 24


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every bar with what was measured; what could not be measured is a miss."""

    def in_units(rows: int) -> float:
        """T(rows) after CONTEXT tokens over llama.cpp Q4_0's T(1) there; NaN if missing."""
        return _median(_step(result, "steps", rows), OURS) / _median(
            _step(result, "steps", 1), Q4_0
        )

    decode, prefill = result.get("decode", {}), result.get("prefill", {})
    start = result["start_up"].get(OURS, {})
    memory = start.get("rss_bytes", math.nan) / result["provenance"]["model_bytes"]
    first_token = result.get("first_token", {}).get("median_s", math.nan)
    return [
        _at_least("classic decode, x llama.cpp same file", speedup(decode, SAME_FILE), 2.2, 2.7),
        _at_least("classic decode, x llama.cpp Q4_0", speedup(decode, Q4_0), 1.6, 2.0),
        _at_most("T(1), in llama.cpp Q4_0 T(1)", in_units(1), 0.62),
        _at_most("T(4), in llama.cpp Q4_0 T(1)", in_units(4), 0.75),
        _at_most("T(8), in llama.cpp Q4_0 T(1)", in_units(8), 1.0),
        _at_least(f"prefill {PREFILL}, x llama.cpp Q4_0", speedup(prefill, Q4_0), 1.0),
        _at_most(f"memory at {PREFILL} tokens, x file size", memory, 2.0),
        _at_most("load once imported, s", start.get("load_s", math.nan), 1.0),
        _at_most("command to first token, s", first_token, 3.0),
    ]


def speedup(timings: dict[str, Any], side: str) -> float:
    """Return how many times faster than `side` ours is; NaN if either is missing."""
    return _median(timings, side) / _median(timings, OURS)


def print_report(result: dict[str, Any]) -> None:
    """Print the bound, then what was measured, losses like wins."""
    _print_provenance(result)
    _print_bound(result)
    sides = [name for name in (OURS, SAME_FILE, Q4_0) if name not in result["missing"]]
    for name, reason in result["missing"].items():
        print(f"missing: {name}: {reason}")
    if "steps" not in result:
        return
    for key, context in (("steps", "context"), ("kind_steps", "kind_context")):
        print(
            f"\nwhole step after {result[context]} tokens, ms: median [min, max] of "
            f"{result['trials']} interleaved trials, and what ran it"
        )
        print(f"rows  {''.join(name.ljust(_WIDTH + 14) for name in sides)}x same  x Q4_0")
        for rows, timings in result[key].items():
            cells = "".join(_cell(timings[name], 1e3).ljust(_WIDTH + 14) for name in sides)
            print(f"{rows:>4}  {cells}{_times(timings)}")
    for title, key, tokens in (
        ("classic decode, ms a token", "decode", 1),
        (f"prefill of {PREFILL}, ms", "prefill", PREFILL),
    ):
        print(f"\n{title}")
        for name in sides:
            timing = result[key][name]
            rate = tokens / timing["median_s"]
            print(f"  {name.ljust(_WIDTH)}{_cell(timing, 1e3).ljust(44)}{rate:9.1f} tok/s")
        print(f"  {'ours over: same file, Q4_0'.ljust(_WIDTH + 44)}{_times(result[key])}")
    _print_start_up(result)
    for name, passed in result["checks"].items():
        print(f"check: {name}: {'pass' if passed else 'FAIL'}")


def print_bars(table: list[dict[str, Any]]) -> None:
    """Print each bar, its value and the verdict."""
    print("\nbars")
    for bar in table:
        value = "not measured" if bar["value"] is None else f"{bar['value']:.3f}"
        verdict = "pass" if bar["passed"] else "MISS"
        goal = ""
        if bar["goal"] is not None:
            goal = f"  (goal {bar['goal']}: {'met' if bar['goal_met'] else 'not met'})"
        print(f"  {bar['name']:<42}{value:>12}  {bar['bar']:<8}{verdict}{goal}")


def _print_provenance(result: dict[str, Any]) -> None:
    p = result["provenance"]
    print(f"machine   {p['cpu']}, {p['cores']} cores, {' '.join(p['flags'])}")
    print(f"          load average {p['load_average']} at the start, kernel {p['kernel']}")
    print(f"model     {p['model']}, {p['model_bytes']} bytes, sha256 {p['model_sha256']}")
    if "q4_0_bytes" in result:
        print(f"          llama.cpp's own Q4_0 requantisation has {result['q4_0_bytes']} bytes")
    modified = " with changes" if p["modified"] else ""
    print(f"versions  slipstream {p.get('slipstream', 'missing')} at {p['commit']}{modified}")
    print(
        f"          llama-cpp-python {p.get('llama_cpp_python', 'missing')}, Python {p['python']}"
    )


def _print_bound(result: dict[str, Any]) -> None:
    bandwidth = result["bandwidth_bytes_per_s"]
    print(f"bound     read bandwidth {bandwidth / 1e9:.1f} GB/s ({result['reader']})")
    if "bound_s" in result:
        print(
            f"          ({result['ours']['weight_bytes'] / 1e6:.1f} MB of weights + "
            f"{result['kv_bytes'] / 1e6:.1f} MB of KV) / bandwidth = "
            f"{result['bound_s'] * 1e3:.2f} ms a step, {1 / result['bound_s']:.0f} tok/s"
        )


def _print_start_up(result: dict[str, Any]) -> None:
    print(f"\nmemory beyond interpreter and imports after {PREFILL} tokens; load once imported")
    for name, start in result["start_up"].items():
        print(
            f"  {name.ljust(_WIDTH)}{start['rss_bytes'] / 1e6:7.1f} MB, "
            f"peak {start['peak_bytes'] / 1e6:.1f} MB, load {start['load_s']:.3f} s"
        )
    if "first_token" in result:
        print(f"slipstream generate to first token: {result['first_token']['median_s']:.2f} s")


def _cell(timing: dict[str, Any], scale: float) -> str:
    median, low, high = (timing[key] * scale for key in ("median_s", "min_s", "max_s"))
    return f"{median:.2f} [{low:.2f}, {high:.2f}] {timing['with']}"


def _times(timings: dict[str, Any]) -> str:
    same, q4_0 = speedup(timings, SAME_FILE), speedup(timings, Q4_0)
    return f"{same:6.2f}  {q4_0:6.2f}"


def _step(result: dict[str, Any], key: str, rows: int) -> dict[str, Any]:
    timings: dict[str, Any] = result.get(key, {}).get(rows, {})
    return timings


def _median(timings: dict[str, Any], side: str) -> float:
    return float(timings.get(side, {}).get("median_s", math.nan))


def _at_least(name: str, value: float, bar: float, goal: float | None = None) -> dict[str, Any]:
    return _bar(name, value, f">= {bar}", value >= bar, goal)


def _at_most(name: str, value: float, bar: float) -> dict[str, Any]:
    return _bar(name, value, f"<= {bar}", value <= bar, None)


def _bar(name: str, value: float, bar: str, passed: bool, goal: float | None) -> dict[str, Any]:
    known = None if math.isnan(value) else value
    met = None if goal is None else bool(value >= goal)
    return {
        "name": name, "value": known, "bar": bar, "passed": passed, "goal": goal, "goal_met": met,
    }  # fmt: skip
