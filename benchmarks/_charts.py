"""Draws the charts of benchmarks/README.md from its tables: python benchmarks/_charts.py

Each table becomes one SVG with a panel per column and a bar per row. A cell counts by its first number.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
LABELS, BAR, GAP, ROW = 300, 120, 60, 22  # widths and heights in pixels
STYLE = """text{font:12px DejaVu Sans,Helvetica,Arial,sans-serif;fill:#24292f}
.bg{fill:#fff}.n{fill:#57606a}.b{fill:#9db4c8}.p{fill:#2f6fb0}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.bg{fill:#131416}.n{fill:#9da7b3}.b{fill:#3f5468}.p{fill:#4a90d9}}"""


def tables() -> dict[str, list[list[str]]]:
    """Return the first table of each section by the section's title, as rows of cells."""
    found = {}
    for section in re.split(r"^## ", (HERE / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        first = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
        lines = first[0].splitlines() if first else []
        rows = [line.strip("| ").split(" | ") for line in lines]
        found[section.partition("\n")[0]] = [row for row in rows if not row[0].startswith("---")]
    return found


def number(cell: str) -> float | None:
    """Return the first number of a cell."""
    match = re.match(r"\d[\d,.]*", cell)
    return float(match[0].replace(",", "")) if match else None


def chart(title: str, header: list[str], rows: list[list[str]]) -> str:
    """Return a table as SVG."""
    width, height = LABELS + (BAR + GAP) * (len(header) - 1), 34 + ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<title>{escape(title)}</title><style>{STYLE}</style><rect class="bg" width="{width}" height="{height}"/>',
    ]
    for i, row in enumerate(rows):
        weight = ' style="font-weight:bold"' if "**" in row[0] else ""
        label = escape(re.sub(r"[*`]", "", row[0]).strip())
        parts.append(f'<text x="8" y="{45 + ROW * i}"{weight}>{label}</text>')
    for column, name in enumerate(header[1:], 1):
        left = LABELS + (BAR + GAP) * (column - 1)
        values = [number(row[column]) for row in rows]
        largest = max(value for value in values if value is not None)
        parts.append(
            f'<text x="{left}" y="20" class="n">{escape(re.sub(r", ([0-9,]+ MB|0 / 2 workers)$", "", name))}</text>'
        )
        for i, value in enumerate(values):
            if value is not None:
                kind, wide = "p" if "**" in rows[i][0] else "b", BAR * value / largest
                parts.append(
                    f'<rect class="{kind}" x="{left}" y="{34 + ROW * i}" width="{wide:.1f}" height="14"/>'
                    f'<text x="{left + wide + 5:.1f}" y="{45 + ROW * i}" class="n">{value:,g}</text>'
                )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write a chart for each table of results."""
    for title, (header, *rows) in tables().items():
        if title in ("Sync", "Cold start", "Repartition", "Loader"):
            (HERE / f"{title.lower().replace(' ', '-')}.svg").write_text(chart(title, header, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
