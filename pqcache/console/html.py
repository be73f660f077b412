"""An inspection as one self-contained HTML page, for screens of any width: no scripts, no pictures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pqcache.benchmark.forecast import Forecast, describe_training
from pqcache.store.inspect.summary import Inspection
from pqcache.units import format_count, format_size

_STYLE = """
:root { color-scheme: light dark; --bar: #3b7dd8; --over: #d64545; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .15rem .6rem .15rem 0; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { overflow-x: auto; } .chart td { padding-right: .5rem; } .chart td:first-child { white-space: nowrap; }
.chart td:nth-child(2) { width: 70%; } .chart .over td { color: var(--over); }
.bar { height: .9rem; background: var(--bar); } .over .bar { background: var(--over); }
code { background: #8882; padding: .1rem .3rem; overflow-wrap: anywhere; }
"""


def inspection_page(
    found: Inspection, training: Forecast | None, verdict: str, commands: tuple[str | None, str | None]
) -> str:
    """Return the page as text.

    ``verdict`` describes the row-group sizes as blocks; ``commands`` correct them for that and for training.
    """
    facts = [
        ("source", found.source),
        ("snapshot", found.snapshot and f"{found.snapshot}, published {found.created}"),
        ("rows", f"{found.rows:,} in {format_count(found.files, 'file')} of {len(found.partitions):,} partitions"),
        ("size", f"{format_size(found.bytes)}, {format_size(found.uncompressed)} decompressed"),
    ]
    if found.keys:
        facts.append(("keys", ", ".join(found.keys)))
    if training is not None:
        facts.append(("training", "; ".join(describe_training(training, found.row_groups))))
    parts = [
        f"<h1>{escape(found.target)}</h1><table>",
        *(f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in facts if value),
        "</table>",
        f"<h2>{format_count(found.row_groups, 'row group')} by size</h2>",
        f"<p>Blocks, as HDFS and Spark read them: {escape(verdict)}.{_command(commands[0])}</p>",
        f"<p>For training:{_command(commands[1])}</p>" if commands[1] else "",
        _histogram(found),
        "<h2>Bytes by column</h2>",
        _sizes([(item.name, item.bytes) for item in sorted(found.columns, key=lambda item: -item.bytes) if item.bytes]),
        "<div class=wide><table><tr><th>column<th>type<th>codec<th>encodings<th class=n>on disk<th class=n>ratio</tr>",
        *(
            f"<tr><td>{escape(item.name)}</td><td>{escape(item.type)}</td><td>{escape(item.codec)}</td>"
            f"<td>{escape(', '.join(item.encodings))}</td><td class=n>{format_size(item.bytes)}</td>"
            f"<td class=n>{item.uncompressed / max(1, item.bytes):.1f}</td></tr>"
            for item in found.columns
            if not item.partition
        ),
        "</table></div>",
        "<h2>Bytes by partition</h2>",
        _sizes([(item.path or "(no partition)", item.bytes) for item in found.partitions]),
    ]
    title = escape(found.target)
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>'
    head += f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    return f"{head}\n<body>\n{chr(10).join(parts)}\n</body></html>\n"


def _command(command: str | None) -> str:
    return f" <code>{escape(command)}</code>" if command else ""


def _histogram(found: Inspection) -> str:
    """A bar for each range of row-group sizes, in another colour above the block size."""
    bars = []
    for number, item in enumerate(found.histogram):
        is_last = number == len(found.histogram) - 1
        name = f"over {format_size(2 * found.block_size)}" if is_last else f"to {format_size(item.high - 1)}"
        if item.high - 1 == found.block_size:
            name += ", the limit"
        bars.append((name, item.count, f"{item.count:,}", item.count > 0 and item.low > found.block_size))
    return _bars(bars)


def _sizes(items: Sequence[tuple[str, int]]) -> str:
    return _bars([(name, size, format_size(size), False) for name, size in items])


def _bars(items: Sequence[tuple[str, int, str, bool]]) -> str:
    """A chart of a horizontal bar for each name, value and text; some of them are over a limit."""
    largest, parts = max((value for _, value, _, _ in items), default=0) or 1, []
    for name, value, text, is_over in items:
        shown = name if len(name) <= 34 else name[:16] + "…" + name[-17:]
        parts.append(
            f'<tr{" class=over" if is_over else ""}><td title="{escape(name)}">{escape(shown)}</td>'
            f'<td><div class=bar style="width: {100 * value / largest:.1f}%"></div></td><td class=n>{text}</td></tr>'
        )
    return f"<table class=chart>{''.join(parts)}</table>"
