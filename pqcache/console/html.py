"""An inspection as one self-contained HTML page: inline SVG charts, no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pqcache.benchmark.forecast import Forecast, describe_training
from pqcache.store.inspect.summary import Inspection
from pqcache.units import format_count, format_size

_STYLE = """
:root { color-scheme: light dark; --bar: #3b7dd8; --over: #d64545; --faint: #8888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .15rem .6rem .15rem 0; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } svg { width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.bar { fill: var(--bar); } .over { fill: var(--over); }
.limit { stroke: var(--over); stroke-dasharray: 4 3; } code { background: #8882; padding: .1rem .3rem; }
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
        _bars([(item.name, item.bytes) for item in sorted(found.columns, key=lambda item: -item.bytes) if item.bytes]),
        "<table><tr><th>column<th>type<th>codec<th>encodings<th class=n>on disk<th class=n>ratio</tr>",
        *(
            f"<tr><td>{escape(item.name)}</td><td>{escape(item.type)}</td><td>{escape(item.codec)}</td>"
            f"<td>{escape(', '.join(item.encodings))}</td><td class=n>{format_size(item.bytes)}</td>"
            f"<td class=n>{item.uncompressed / max(1, item.bytes):.1f}</td></tr>"
            for item in found.columns
            if not item.partition
        ),
        "</table>",
        "<h2>Bytes by partition</h2>",
        _bars([(item.path or "(no partition)", item.bytes) for item in found.partitions]),
    ]
    title = escape(found.target)
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f"{head}\n<body>\n{chr(10).join(parts)}\n</body></html>\n"


def _command(command: str | None) -> str:
    return f" <code>{escape(command)}</code>" if command else ""


def _histogram(found: Inspection) -> str:
    """Return a column chart of the row-group sizes, the limit marked."""
    bins, width, height = found.histogram, 900, 260
    largest, step = max((item.count for item in bins), default=0) or 1, width / max(1, len(bins))
    parts = []
    for i, item in enumerate(bins):
        tall, x, over = 190 * item.count / largest, i * step, item.low > found.block_size
        label = (
            f"over {format_size(2 * found.block_size)}" if i == len(bins) - 1 else f"to {format_size(item.high - 1)}"
        )
        parts.append(
            f'<rect class="{"over" if over else "bar"}" x="{x + 4:.1f}" y="{220 - tall:.1f}" width="{step - 8:.1f}" '
            f'height="{tall:.1f}"><title>{item.count:,}</title></rect>'
            f'<text x="{x + step / 2:.1f}" y="{214 - tall:.1f}" text-anchor="middle">{item.count:,}</text>'
            f'<text x="{x + step / 2:.1f}" y="240" text-anchor="middle">{label}</text>'
        )
        if item.high - 1 == found.block_size:
            end = x + step
            parts.append(f'<line class="limit" x1="{end:.1f}" x2="{end:.1f}" y1="5" y2="225"/>')
            parts.append(f'<text x="{end + 4:.1f}" y="16">limit {format_size(found.block_size)}</text>')
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _bars(items: Sequence[tuple[str, int]]) -> str:
    """Return a chart of one horizontal bar per item."""
    largest, parts = max((size for _, size in items), default=0) or 1, []
    for i, (name, size) in enumerate(items):
        y, wide = 20 * i, 520 * size / largest
        shown = name if len(name) <= 34 else name[:16] + "…" + name[-17:]
        parts.append(
            f'<text x="240" y="{y + 14}" text-anchor="end">{escape(shown)}<title>{escape(name)}</title></text>'
            f'<rect class="bar" x="250" y="{y + 3}" width="{wide:.1f}" height="14"/>'
            f'<text x="{256 + wide:.1f}" y="{y + 14}">{format_size(size)}</text>'
        )
    return f'<svg viewBox="0 0 900 {max(20, 20 * len(items))}" role="img">{"".join(parts)}</svg>'
