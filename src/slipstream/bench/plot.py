"""A run as one picture: what each arm gains, what each width costs, how far drafts are right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.record import Setup
from slipstream.bench.summary import Row
from slipstream.bench.workload import OVERALL
from slipstream.errors import ConfigError, SlipstreamError

INK, PAPER, GRID = "#222222", "#ffffff", "#dddddd"
# Okabe and Ito's colours, told apart by colour-blind readers too; auto is the last, strongest one.
COLOURS = ("#56b4e9", "#009e73", "#f0e442", "#0072b2", "#cc79a7", "#e69f00", "#999999")
AUTO = "#d55e00"
# A place that was reached less often than this is left out of the picture.
FEWEST_DRAFTS = 20
# An interval that reaches higher than so many times its bar is cut at the frame.
TALLEST = 2.0


def plot(path: Path, setup: Setup, rows: Sequence[Row]) -> None:
    """Write a PNG of the smallest batch and the first variant.

    Raises:
        ConfigError: matplotlib is missing.
        SlipstreamError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib", hint="pip install 'slipstream[bench]'"
        ) from error
    ours = [row for row in rows if row.variant]
    batch, variant = min(row.batch for row in ours), ours[0].variant
    shown = [row for row in ours if row.batch == batch and row.variant == variant]
    figure = Figure(figsize=(13, 8), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1))
    _speedups(figure.add_subplot(grid[0, :]), shown)
    _costs(figure.add_subplot(grid[1, 0]), setup, variant)
    _acceptance(figure.add_subplot(grid[1, 1]), shown)
    made = setup.provenance
    figure.suptitle(
        _plain(f"{made['model']}, {setup.drafter} drafts, batch {batch}: decode over classic"),
        x=0.01,
        ha="left",
        fontsize=13,
    )
    figure.supxlabel(
        _plain(
            f"{made['cpu']}, {made['cores']} cores, {setup.backend['name']} "
            f"({setup.backend['reason']}) · slipstream {made['slipstream']} {made['commit'] or ''} "
            f"· workload {setup.workload.name} {setup.workload.sha256[:8]} · bars: 95 % intervals"
        ),
        fontsize=8,
        color="#555555",
    )
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise SlipstreamError(f"cannot write {path}: {error.strerror}") from error


def _speedups(axes: Any, rows: Sequence[Row]) -> None:
    categories = list(dict.fromkeys(row.category for row in rows))
    arms = [row for row in rows if row.category == OVERALL and row.requested_k != 0]
    width = 0.84 / max(len(arms), 1)
    tops = [1.25]
    for number, arm in enumerate(arms):
        own = {row.category: row for row in rows if row.requested_k == arm.requested_k}
        for place, category in enumerate(categories):
            row = own.get(category)
            if row is None or row.speedup is None:
                continue
            low, high = row.ci or (row.speedup, row.speedup)
            tops.append(min(high, TALLEST * row.speedup))
            axes.bar(
                place - 0.42 + (number + 0.5) * width,
                row.speedup,
                width * 0.92,
                color=_colour(arm, number),
                yerr=None
                if row.ci is None
                else [[max(row.speedup - low, 0)], [max(high - row.speedup, 0)]],
                error_kw={"ecolor": INK, "elinewidth": 0.8, "capsize": 1.5},
                label=arm.name if place == 0 else None,
            )
    axes.axhline(1.0, color=INK, linewidth=1)
    turned = {"rotation": 30, "ha": "right"} if sum(map(len, categories)) > 110 else {}
    axes.set_xticks(range(len(categories)), [_plain(name) for name in categories], **turned)
    _finish(axes, "speedup over classic, by category and arm", "", "times classic")
    _legend(axes, ncols=len(arms), loc="upper left")
    axes.set_ylim(0, max(tops) * 1.2)  # room for the legend


def _costs(axes: Any, setup: Setup, variant: str) -> None:
    times = {rows: s for rows, s in setup.times_s.get(variant, {}).items() if rows <= 16}
    axes.plot(list(times), [1e3 * s for s in times.values()], "o-", color=AUTO, label="measured")
    axes.axhline(
        1e3 * setup.bound.seconds, color=INK, linestyle="--", linewidth=1, label="weights read once"
    )
    if 1 in times:
        axes.plot(
            list(times),
            [1e3 * times[1] * rows for rows in times],
            ":",
            color="#777777",
            label="one step for each row",
        )
        axes.set_ylim(0, 1e3 * max(*times.values(), setup.bound.seconds) * 1.25)
    title = f"what a forward costs after {setup.context_len} tokens, by rows (1 + drafted)"
    _finish(axes, title, "rows", "ms")
    _legend(axes)


def _acceptance(axes: Any, rows: Sequence[Row]) -> None:
    own = [row for row in rows if row.requested_k == "auto"] or [
        row for row in rows if row.requested_k not in (0, None)
    ]
    for number, row in enumerate(own):
        shown = [
            chance
            for chance, drafted in zip(
                row.acceptance_by_position, row.drafted_by_position, strict=True
            )
            if drafted >= FEWEST_DRAFTS
        ]
        if shown:
            places = range(1, len(shown) + 1)
            overall = row.category == OVERALL
            axes.plot(
                places,
                shown,
                "o-" if overall else ".-",
                color=AUTO if overall else COLOURS[number % len(COLOURS)],
                linewidth=2 if overall else 1,
                label=_plain(row.category),
            )
    axes.set_ylim(0, 1.05)
    _finish(axes, "acceptance by position, given those before", "place of the draft", "share")
    _legend(axes, ncols=2)


def _colour(row: Row, number: int) -> str:
    return AUTO if row.requested_k == "auto" else COLOURS[number % len(COLOURS)]


def _plain(text: str) -> str:
    """Return text that stands for itself: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


def _legend(axes: Any, **how: Any) -> None:
    """Draw a legend, if there is anything to explain."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, **how)


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
