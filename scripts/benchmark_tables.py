"""Fill the tables of BENCHMARKS.md from what `slipstream bench --json` wrote.

    python scripts/benchmark_tables.py [--check]

A table stands between `<!-- FILE TABLE [BATCH] -->` and `<!-- end -->`; FILE lies in
docs/benchmark_results. With --check nothing is written; the exit code is 1 if a table would change.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "BENCHMARKS.md"
RESULTS = ROOT / "docs" / "benchmark_results"
MARK = re.compile(r"(<!-- (\S+\.json) (\w+)(?: (\d+))? -->\n).*?(<!-- end -->)", re.DOTALL)

Result = dict[str, Any]


def machine(result: Result, _: int) -> list[str]:
    """Return one line that says what was measured, on what."""
    made = result["provenance"]
    asked = made["workload"]
    return [
        f"{made['cpu']} ({', '.join(made['flags'])}), {made['cores']} cores; {made['model']}, "
        f"sha256 {made['model_sha256'][:12]}; slipstream {made['slipstream']} at commit "
        f"{made['commit']}{', modified' if made['modified'] else ''}; Python {made['python']}; "
        f"workload {asked['name']} {asked['sha256'][:12]}; "
        f"{made['limits']['max_tokens']} tokens a reply; load average at the start "
        f"{made['load_average']}."
    ]


def bound(result: Result, _: int) -> list[str]:
    """Return the physical bound beside what was reached."""
    ms = result["bound"]["ms"]
    classic = next(a for a in result["arms"] if a["requested_k"] == 0 and a["batch"] == 1)
    return [
        f"Bound: {result['bound']['weight_bytes'] / 1e6:.1f} MB of weights at "
        f"{result['bound']['bandwidth'] / 1e9:.1f} GB/s ({result['bound']['how']}) take "
        f"{ms:.2f} ms, {1000 / ms:.0f} tokens/s at one row; classic decoding makes "
        f"{classic['tokens_per_s']:.0f} of them over all prompts."
    ]


def overall(result: Result, batch: int) -> list[str]:
    """Return every arm over all categories."""
    lines = _head(
        *("arm", "tokens/s", "speedup", "95 % interval", "predicted", "mean drafted"),
        *(
            "acceptance length",
            "p50 / p95 / worst round, ms",
            "classic / verify / draft / host, ms",
        ),
    )
    for arm in _arms(result, batch, "overall"):
        lines.append(
            _line(
                arm["name"],
                f"{arm['tokens_per_s']:.0f}",
                _times(arm["speedup"]),
                _interval(arm["ci"]),
                _times(arm["predicted_speedup"]),
                _number(arm["mean_drafted"]),
                _number(arm["acceptance_length"]),
                " / ".join(_number(arm["latency_ms"].get(n)) for n in ("p50", "p95", "worst")),
                " / ".join(
                    _number(arm[f"{n}_ms"]) for n in ("classic", "verify", "draft", "overhead")
                ),
            )
        )
    return lines


def categories(result: Result, batch: int) -> list[str]:
    """Return speedups by category and arm."""
    arms = [arm for arm in _arms(result, batch, "overall") if arm["requested_k"] != 0]
    names = [arm["name"].split(" (")[0] for arm in arms]
    lines = _head("category", "prompts", "tokens", "classic tokens/s", *names)
    order = dict.fromkeys(arm["category"] for arm in result["arms"] if arm["batch"] == batch)
    for category in [*(name for name in order if name != "overall"), "overall"]:
        own = {arm["requested_k"]: arm for arm in _arms(result, batch, category)}
        lines.append(
            _line(
                category,
                str(own[0]["prompts"]),
                f"{own[0]['tokens']:,}",
                f"{own[0]['tokens_per_s']:.0f}",
                *(
                    f"{_times(own[arm['requested_k']]['speedup'])} "
                    f"({_interval(own[arm['requested_k']]['ci'])})"
                    for arm in arms
                ),
            )
        )
    return lines


def auto(result: Result, batch: int) -> list[str]:
    """Return what auto did in each category."""
    lines = _head(
        *("category", "tokens/s", "rounds k > 0", "k = 0", "mean drafted", "acceptance length"),
        *("acceptance by position", "verdicts at the end of replies"),
    )
    for arm in result["arms"]:
        if arm["requested_k"] == "auto" and arm["batch"] == batch:
            lines.append(
                _line(
                    arm["category"],
                    f"{arm['tokens_per_s']:.0f}",
                    f"{arm['rounds']:,}",
                    f"{arm['classic_rounds']:,}",
                    _number(arm["mean_drafted"]),
                    _number(arm["acceptance_length"]),
                    " ".join(f"{chance:.2f}" for chance in arm["acceptance_by_position"][:4]),
                    ", ".join(f"{name} {count}" for name, count in sorted(arm["verdicts"].items())),
                )
            )
    return lines


def peers(result: Result, _: int) -> list[str]:
    """Return other engines, those that failed included."""
    arms = {arm["name"]: arm for arm in _arms(result, 1, "overall") if arm["requested_k"] is None}
    ratios = {
        (entry["arm"], entry["peer"]): entry
        for entry in result["against_peers"]
        if entry["category"] == "overall"
    }
    lines = _head("engine", "tokens/s", "ours classic over it", "ours auto over it", "setting")
    for name, arm in arms.items():
        facts = result["provenance"]["peers"].get(name, {})
        cells = []
        for mine in ("classic", "auto"):
            entry = ratios.get((mine, name))
            cells.append(f"{_times(entry['ratio'])} ({_interval(entry['ci'])})" if entry else "-")
        lines.append(_line(name, f"{arm['tokens_per_s']:.0f}", *cells, _setting(facts)))
    for mine in _arms(result, 1, "overall"):
        if mine["name"] in ("classic", "auto"):
            lines.append(_line(f"slipstream {mine['name']}", f"{mine['tokens_per_s']:.0f}"))
    lines += [_line(name, "-", reason) for name, reason in result["failed_peers"].items()]
    return lines


def closing(result: Result, _: int) -> list[str]:
    """Return precision, the bench's own share, notes and mismatches in one paragraph."""
    reached = result["precision"]
    notes = " ".join(f"Note: {note}." for note in result["notes"])
    widths = "No row has an interval."
    if reached is not None:
        of, total = reached["of"], reached["overall"]
        overall = "-" if total is None else f"±{100 * total:.0f} %"
        widths = (
            f"Overall intervals are at most {overall} wide; the widest of a category is "
            f"±{100 * reached['widest']:.0f} % "
            f"({of['category']}, {of['arm']}, batch {of['batch']})."
        )
    return [
        f"{widths} The bench's own work was {100 * result['own_share']:.2f} % of decode time. "
        f"Replies that differed: {result['mismatches']}. {notes}".rstrip()
    ]


TABLES: dict[str, Callable[[Result, int], list[str]]] = {
    "machine": machine,
    "bound": bound,
    "overall": overall,
    "categories": categories,
    "auto": auto,
    "peers": peers,
    "closing": closing,
}


def filled(page: str) -> str:
    """Return the page with every table made anew."""

    def fill(match: re.Match[str]) -> str:
        opening, file, table, batch, end = match.groups()
        result = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        return opening + "\n".join(TABLES[table](result, int(batch or 1))) + "\n" + end

    return MARK.sub(fill, page)


def main() -> int:
    """Fill the tables, or only look whether they are up to date."""
    page = PAGE.read_text(encoding="utf-8")
    new = filled(page)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    return int(new != page)


def _arms(result: Result, batch: int, category: str) -> list[dict[str, Any]]:
    return [a for a in result["arms"] if a["batch"] == batch and a["category"] == category]


def _setting(facts: dict[str, Any]) -> str:
    wanted = ("threads", "flash", "ubatch", "dtype", "lookup")
    return ", ".join(f"{name} {facts[name]}" for name in wanted if name in facts) or "-"


def _head(*cells: str) -> list[str]:
    return [_line(*cells), "|" + "---|" * len(cells)]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _interval(ci: list[float] | None) -> str:
    if ci is None:
        return "-"
    return "wide" if ci[1] > 4 * ci[0] else f"{ci[0]:.2f} to {ci[1]:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
