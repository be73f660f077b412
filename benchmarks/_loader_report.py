"""Tables of what loader.py measured: all of it as text, and those of README.md as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from _loader_data import SHAPES, parts


class Case(NamedTuple):
    dataset: str
    loader: str
    workers: int

    def __str__(self) -> str:
        return f"{self.dataset} {self.loader} {self.workers}"


@dataclass(kw_only=True)
class Measurement:
    """What a process measured. Each epoch has seconds, rows, cpu and, of the limit, decoder."""

    epochs: list[dict[str, Any]]
    first_batch: float
    peak: int
    own: int
    mix: float
    once: float


Measured = dict[Case, list[Measurement]]


def best(runs: list[Measurement]) -> tuple[float, float, str]:
    """Return rows/s and CPU-seconds of a row of the fastest decoder (of a loader: its own), and that decoder."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        seen: set[str] = set()
        for epoch in run.epochs:
            if epoch["decoder"] in seen and epoch["rows"]:
                ways.setdefault(epoch["decoder"], []).append(epoch)
            seen.add(epoch["decoder"])
    rates = {way: statistics.median(e["rows"] / e["seconds"] for e in epochs) for way, epochs in ways.items()}
    if not rates:
        return 0.0, 0.0, "no rows in time"
    way = max(rates, key=lambda name: rates[name])
    return rates[way], statistics.median(e["cpu"] / e["rows"] for e in ways[way]), way


def limit_of(measured: Measured, dataset: str) -> tuple[float, str]:
    """Return rows/s of the fastest decoder of a dataset, and its name."""
    limits = [
        c for c in measured if c.dataset == dataset and c.loader.startswith("limit") and not c.loader.endswith("copied")
    ]
    return max(((best(measured[c])[0], best(measured[c])[2] or c.loader) for c in limits), default=(0.0, ""))


def table(measured: Measured) -> str:
    """Return everything: medians, and the share of the limit."""
    heads = [("dataset", -20), ("loader", -16), ("workers", 8), ("rows/s", 13), ("of limit", 10), ("CPU us", 9)]
    heads += [("1st epoch", 11), ("1st batch", 11), ("PSS MB", 8), ("own MB", 8), ("mix", 6), ("once", 6)]
    lines = ["".join(text.ljust(-width) if width < 0 else text.rjust(width) for text, width in heads)]
    for case, runs in measured.items():
        (rate, cpu, way), (limit, _) = best(runs), limit_of(measured, case.dataset)
        first = statistics.median(run.epochs[0]["rows"] / run.epochs[0]["seconds"] for run in runs)
        batch = statistics.median(run.first_batch for run in runs)
        peak, own = (max(sizes) >> 10 for sizes in zip(*((run.peak, run.own) for run in runs), strict=True))
        mix = statistics.median(run.mix for run in runs)
        once = f"{min(run.once for run in runs):.2f}" if mix else "-"
        share = f"{rate / limit:.2f}" if limit else "-"
        lines.append(
            f"{case.dataset:<20}{case.loader:<16}{case.workers:>8}{rate:>13,.0f}{share:>10}{cpu * 1e6:>9.2f}"
            f"{first:>11,.0f}{batch:>11.2f}{peak:>8}{own:>8}{mix or '-':>6}{once:>6}  {way}"
        )
    return "\n".join(lines) + "\n"


# ---- Markdown


def thousands(rate: float) -> str:
    """Return thousands of rows per second in three digits."""
    return f"{float(f'{rate / 1000:.3g}'):,g}" if rate else "0"


def share(part: float, of: float) -> str:
    return f"{part / of:.2f}".removeprefix("0") if of else "-"


def in_workers(measured: Measured, dataset: str, loader: str, show: Callable[[float, int], str]) -> str:
    """Return a cell: a value for each number of workers."""
    found = sorted(case for case in measured if case[:2] == (dataset, loader))
    return " / ".join(show(best(measured[case])[0], case.workers) for case in found) or "-"


def lines_of(head: list[str], rows: list[list[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n"


def fastest_peer(measured: Measured, dataset: str, workers: int, in_memory: bool) -> tuple[float, str]:
    """Return rows/s of the fastest peer that shuffles, and its name; peers of dense rows read the same as lists."""
    kind, _, size = parts(dataset)
    source = kind if size == 32 else f"{kind}-{size}MB"
    peers = [c for c in measured if c.dataset == source and c.workers == workers and is_peer(c.loader)]
    peers = [c for c in peers if (c.loader == "in-memory") == in_memory]
    return max(((best(measured[c])[0], c.loader) for c in peers), default=(0.0, ""))


def is_peer(loader: str) -> bool:
    return not loader.startswith(("limit", "pqcache", "40-lines"))


def markdown(measured: Measured, failed: dict[Case, str], titles: dict[str, str]) -> str:
    """Return the tables of README.md that there are measurements for."""
    kinds = [name for name in (*SHAPES, "dense") if any(case.dataset == name for case in measured)]
    if not kinds:
        return ""
    parts_of_page = [speeds(measured, kinds, titles), ratios(measured, kinds)]
    for title, pairs in (("row groups", sizes(measured)), ("written by", writers(measured))):
        if pairs:
            parts_of_page.append(variants(measured, title, pairs))
    parts_of_page.append("\n".join(f"{case}: failed: {reason}" for case, reason in failed.items()))
    return "\n".join(parts_of_page)


def speeds(measured: Measured, kinds: list[str], titles: dict[str, str]) -> str:
    """Return the table of thousands of rows per second."""
    workers = " / ".join(str(n) for n in sorted({c.workers for c in measured if c.loader == "pqcache"}))
    names = [n for n in dict.fromkeys(c.loader for c in measured) if not n.startswith(("limit", "pqcache"))]
    rows = [
        [f"**{name}**" if name == "pqcache" else titles.get(name, name)]
        + [in_workers(measured, kind, name, lambda rate, _: thousands(rate)) for kind in kinds]
        for name in ["pqcache", *names]
    ]
    limits = [limit_of(measured, kind) for kind in kinds]
    rows.append(["decode limit", *(f"{thousands(rate)} ({way})" if rate else "-" for rate, way in limits)])
    return lines_of(["tool", *(f"{kind}, {workers} workers" for kind in kinds)], rows)


def ratios(measured: Measured, kinds: list[str]) -> str:
    """Return pqcache's share of the decode limit, and its ratio to the peers."""

    def row(title: str, base: Callable[[str, int], tuple[float, str]]) -> list[str]:
        def cell(kind: str) -> str:
            def show(rate: float, workers: int) -> str:
                other, name = base(kind, workers)
                return share(rate, other) + (f" ({name})" if name not in ("", "in-memory") else "")

            return in_workers(measured, kind, "pqcache", show)

        return [title, *map(cell, kinds)]

    rows = [
        row("of the decode limit", lambda kind, _: (limit_of(measured, kind)[0], "")),
        row("times the fastest peer that reads files", lambda kind, n: fastest_peer(measured, kind, n, False)),
        row("times everything in memory", lambda kind, n: fastest_peer(measured, kind, n, True)),
    ]
    return lines_of(["pqcache", *kinds], rows)


def sizes(measured: Measured) -> list[tuple[str, dict[str, str]]]:
    """Return the datasets of each row-group size, by kind."""
    found = [f"{size}MB" for size in (8, 16, 32, 64, 128)]
    rows = [(s, {k: k if s == "32MB" else f"{k}-{s}" for k in SHAPES}) for s in found]
    rows = [(s, {k: d for k, d in row.items() if any(c.dataset == d for c in measured)}) for s, row in rows]
    rows = [(s.replace("MB", " MB"), row) for s, row in rows if row]
    return rows if len(rows) > 1 else []


def writers(measured: Measured) -> list[tuple[str, dict[str, str]]]:
    """Return the datasets of each writer, by kind."""
    titles = {"pyarrow": "pyarrow", "duckdb": "DuckDB", "spark": "Spark", "pqcache": "pqcache repartition"}
    rows = [(title, {k: k if w == "pyarrow" else f"{k}-{w}" for k in SHAPES}) for w, title in titles.items()]
    rows.append(("pqcache repartition --dense", {"tokens": "dense"}))
    rows = [(title, {k: d for k, d in row.items() if any(c.dataset == d for c in measured)}) for title, row in rows]
    rows = [(title, row) for title, row in rows if row]
    return rows if len(rows) > 2 else []


def variants(measured: Measured, title: str, rows: list[tuple[str, dict[str, str]]]) -> str:
    """Return a table of thousands of rows per second and shares of the limit: a row a variant, a column a kind."""
    kinds = [kind for kind in SHAPES if any(kind in row for _, row in rows)]

    def cell(dataset: str | None) -> str:
        if dataset is None:
            return "-"
        limit = limit_of(measured, dataset)[0]
        shares = in_workers(measured, dataset, "pqcache", lambda rate, _: share(rate, limit))
        return f"{in_workers(measured, dataset, 'pqcache', lambda rate, _: thousands(rate))} ({shares})"

    return lines_of([title, *kinds], [[name, *(cell(row.get(kind)) for kind in kinds)] for name, row in rows])
