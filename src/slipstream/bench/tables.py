"""A run as tables for people: overall, by category, kernels side by side, peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from slipstream.bench.record import Setup, precision_reached
from slipstream.bench.run import Run
from slipstream.bench.summary import Row, Trials
from slipstream.bench.workload import OVERALL

# An interval whose ends are this many times apart says nothing; the JSON has it all the same.
WIDE = 4.0
_STYLES = {"gain": "green", "loss": "red", "even": "", "unsure": "dim"}


def tables(setup: Setup, run: Run, trials: Trials, rows: Sequence[Row]) -> Iterator[Table | str]:
    """Yield what is printed after a run, in order."""
    variants = list(dict.fromkeys(row.variant for row in rows if row.variant))
    for batch in trials.batches:
        for variant in variants:
            own = [row for row in rows if row.batch == batch and row.variant == variant]
            title = f"batch {batch}" + (f", {variant}" if len(variants) > 1 else "")
            total = [row for row in own if row.category == OVERALL]
            yield speeds(f"overall, {title}", total)
            yield rounds(f"rounds, {title}", total)
            yield by_category(f"speedup over classic, {title}", own, trials.categories)
            yield details(title, own)
    if len(variants) > 1:
        yield kernels(rows, variants)
    if any(arm.peer for arm in run.arms) or run.failed:
        yield peers(run, trials, rows)
    yield from closing(setup, run, rows)


def speeds(title: str, rows: Sequence[Row]) -> Table:
    """Return how fast every arm was."""
    table = _table(
        title,
        *("arm", "tok/s", "speedup", "95 % interval", "predicted"),
        *("p50 ms/token", "p95", "worst round", "verdict"),
    )
    for row in rows:
        table.add_row(
            row.name,
            _number(row.tokens_per_s, 0),
            _speedup(row),
            _interval(row.ci),
            _number(row.predicted_speedup, 2),
            *(_number(row.latency_ms.get(name), 2) for name in ("p50", "p95", "worst")),
            _verdict(row),
        )
    return table


def rounds(title: str, rows: Sequence[Row]) -> Table:
    """Return what the rounds of every arm were, and what they took."""
    table = _table(
        title,
        *("arm", "drafted", "acc. length", "by position", "rounds by k"),
        *("classic ms", "verify", "draft", "overhead"),
    )
    for row in rows:
        table.add_row(
            row.name,
            _number(row.mean_drafted, 2),
            _number(row.acceptance_length, 2),
            _positions(row),
            _widths(row),
            _number(row.classic_ms, 2),
            _number(row.verify_ms, 2),
            _number(row.draft_ms, 3),
            _number(row.overhead_ms, 2),
        )
    return table


def by_category(title: str, rows: Sequence[Row], categories: Sequence[str]) -> Table:
    """Return speedups, a line a category and a column an arm."""
    arms = [row for row in rows if row.category == OVERALL and row.requested_k != 0]
    table = _table(title, "category", "classic tok/s", *(row.name.split(" ")[0] for row in arms))
    for category in (*categories, OVERALL):
        own = {row.requested_k: row for row in rows if row.category == category}
        if 0 not in own:
            continue
        cells = [
            f"{_speedup(own[arm.requested_k])} {_interval(own[arm.requested_k].ci)}"
            if arm.requested_k in own
            else "-"
            for arm in arms
        ]
        table.add_row(escape(category), _number(own[0].tokens_per_s, 0), *cells)
    return table


def details(title: str, rows: Sequence[Row]) -> Table:
    """Return what auto, else the last arm, did in each category."""
    chosen = "auto" if any(row.requested_k == "auto" for row in rows) else rows[-1].requested_k
    table = _table(
        f"{'auto' if chosen == 'auto' else f'k={chosen}'}, {title}",
        *("category", "prompts", "tokens", "tok/s", "drafted", "acc. length"),
        *("by position", "rounds by k", "p95 ms", "worst", "verdicts"),
    )
    for row in rows:
        if row.requested_k == chosen:
            table.add_row(
                escape(row.category),
                str(row.prompts),
                f"{row.tokens:,}",
                _number(row.tokens_per_s, 0),
                _number(row.mean_drafted, 2),
                _number(row.acceptance_length, 2),
                _positions(row),
                _widths(row),
                _number(row.latency_ms.get("p95"), 2),
                _number(row.latency_ms.get("worst"), 2),
                " ".join(f"{name} {count}" for name, count in row.verdicts.items()),
            )
    return table


def kernels(rows: Sequence[Row], variants: Sequence[str]) -> Table:
    """Return what a step took under each variant, beside the first; every cell has equal output."""
    table = _table(
        "verify variants: ms of a forward with drafts (classic step at k = 0), x the first",
        *("batch", "k", "rows", *variants),
    )
    cells = {
        (row.batch, row.requested_k, row.variant): row
        for row in rows
        if row.category == OVERALL and row.requested_k != "auto"  # it runs other widths each time
    }
    for batch, k in dict.fromkeys((batch, k) for batch, k, variant in cells if variant):
        own = [cells.get((batch, k, variant)) for variant in variants]
        times = [
            None if row is None else row.classic_ms if k == 0 else row.verify_ms for row in own
        ]
        drafted = next((row.mean_drafted for row in own if row and row.mean_drafted), 0.0)
        base = times[0]
        table.add_row(
            str(batch),
            str(k),
            _number(batch * (1 + drafted), 1),
            *(
                "-" if time is None else f"{time:.3f}" + (f" {time / base:.3f}x" if base else "")
                for time in times
            ),
        )
    return table


def peers(run: Run, trials: Trials, rows: Sequence[Row]) -> Table:
    """Return other engines beside ours; those that failed are lines that say so."""
    names = ("classic", "auto")
    ours = {
        name: index
        for name in names
        for index, arm in enumerate(run.arms)
        if arm.variant == run.arms[0].variant and arm.name == name
    }
    table = _table(
        "other engines on the same prompts, batch 1",
        *("engine", "tok/s", *(f"ours {name}, x it" for name in ours)),
    )
    for row in rows:
        if row.category == OVERALL and row.batch == 1 and not row.variant:
            index = next(i for i, arm in enumerate(run.arms) if arm.peer == row.name)
            cells = []
            for mine in ours.values():
                ratio, ci = trials.ratio(mine, index, 1)
                cells.append("-" if ratio is None else f"{ratio:.2f}x {_interval(ci)}")
            table.add_row(row.name, _number(row.tokens_per_s, 0), *cells)
    for name, reason in run.failed.items():
        table.add_row(name, "-", f"[yellow]{escape(reason)}[/yellow]")
    return table


def closing(setup: Setup, run: Run, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines behind the tables: precision, own cost, notes, warnings, outputs."""
    yield from answer(setup, run, rows)
    yield precision(setup, rows)
    yield f"the bench's own work: {100 * run.own_share:.2f} % of decode time"
    for note in run.notes:
        yield f"note: {escape(note)}"
    for warning in setup.warnings:
        yield f"[red]misleading[/red]: {escape(warning.text)}"
    if run.mismatches:
        yield f"[red]outputs differ[/red]: {escape(str(run.mismatches[0]))}"
    else:
        yield "outputs: every reply of every arm has the token ids of classic decoding"


def answer(setup: Setup, run: Run, rows: Sequence[Row]) -> Iterator[str]:
    """Yield what was asked, in a sentence for each batch: auto beside the best fixed width."""
    made = setup.provenance
    ran = len({trial.group for trial in run.trials})
    yield (
        f"{escape(made['model'])}, {escape(setup.drafter)} drafts, {setup.backend['name']} "
        f"({escape(setup.backend['reason'])}), {made['cpu']}, {made['cores']} cores; workload "
        f"{escape(setup.workload.name)}, {ran} of {len(run.groups)} groups of prompts"
    )
    first = run.arms[0].variant
    total = [r for r in rows if r.category == OVERALL and first and r.variant == first.name]
    for batch in dict.fromkeys(row.batch for row in total):
        own = [row for row in total if row.batch == batch and row.speedup is not None]
        fixed = [row for row in own if isinstance(row.requested_k, int) and row.requested_k]
        best = max(fixed, key=lambda row: row.speedup or 0.0, default=None)
        said = [
            f"{name} {_speedup(row)} ({_interval(row.ci)})"
            for name, row in (
                ("auto", next((row for row in own if row.requested_k == "auto"), None)),
                (f"best fixed width {best.name}" if best else "", best),
            )
            if row is not None
        ]
        yield f"batch {batch}: {', '.join(said)}, times classic"


def precision(setup: Setup, rows: Sequence[Row]) -> str:
    """Return how narrow the intervals are, in words."""
    reached, asked = precision_reached(rows), f"±{100 * setup.limits.precision:g} %"
    if reached is None:
        return f"precision: no interval, too few conversations; {asked} was asked for"
    of, overall = reached["of"], reached["overall"]
    total = "no overall interval" if overall is None else f"{_share(overall)} overall"
    without = f"; {reached['without']} rows have no interval" if reached["without"] else ""
    verdict = "within" if reached["widest"] <= setup.limits.precision else "not within"
    return (
        f"precision: {total}; widest in {escape(of['category'])} ({escape(of['arm'])}, batch "
        f"{of['batch']}), {_share(reached['widest'])}, {verdict} the {asked} asked for{without}"
    )


def _share(width: float) -> str:
    return f"±{100 * width:.1f} %" if width < 1 else "more than ±100 %"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        # On a narrow terminal cells are folded: a number that is cut says something else.
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _speedup(row: Row) -> str:
    if row.speedup is None:
        return "-"
    style = _STYLES[row.outcome]
    text = f"{row.speedup:.2f}x"
    return f"[{style}]{text}[/{style}]" if style else text


def _interval(ci: tuple[float, float] | None) -> str:
    if ci is None:
        return "-"
    return f"{ci[0]:.2f}–{ci[1]:.2f}" if ci[1] < WIDE * ci[0] else "wide"


def _verdict(row: Row) -> str:
    said = max(row.verdicts, key=lambda name: row.verdicts[name]) if row.verdicts else ""
    policy = f"{said}, " if said in ("enable", "decline") else ""
    return policy + ("-" if row.requested_k == 0 else row.outcome)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _positions(row: Row) -> str:
    return " ".join(f"{chance:.2f}" for chance in row.acceptance_by_position[:4]) or "-"


def _widths(row: Row) -> str:
    """Return the four commonest widths and their rounds, in order of width."""
    top = sorted(row.k_histogram.items(), key=lambda item: -item[1])[:4]
    return " ".join(f"{k}:{count}" for k, count in sorted(top, key=lambda item: int(item[0])))
