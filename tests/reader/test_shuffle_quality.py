"""How well orders mix, and that the tables in docs/loading.md say so."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pqcache.reader.memory_budget import RowGroupSizes, fit, largest_window
from pqcache.reader.order import Order, mixing
from tests import ROOT

PAGE = ROOT / "docs" / "loading.md"


def sizes_of(row_groups: int, size: int) -> RowGroupSizes:
    each = np.full(row_groups, size)
    return RowGroupSizes(each, each, each)


def table(first: str) -> list[list[str]]:
    """Return the rows of the page's table whose head begins with ``first``."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    rows = []
    while lines[start].startswith("|"):
        rows.append([cell.strip() for cell in lines[start].strip("|").split("|")])
        start += 1
    return rows


LARGE = [pytest.param(window, marks=pytest.mark.deep) for window in (2, 4, 16, 32)]


@pytest.mark.parametrize("window", [1, 8, *LARGE])
def test_the_page_says_how_windows_mix(window: int) -> None:
    rows = {int(row[0]): list(map(float, row[1:])) for row in table("window")}
    assert list(rows) == [1, 2, 4, 8, 16, 32]
    groups, shared, spread, memory = rows[window]
    found = mixing(Order(counts=np.full(256, 20_000), batch_size=256, lanes=1, window=window))
    assert found.groups == pytest.approx(groups, abs=0.06)
    assert found.shared == pytest.approx(shared, abs=0.0006)
    assert found.spread == pytest.approx(spread, abs=0.0006)
    if window <= 16:
        sizes, needed = sizes_of(256, 1 << 20), int(memory * (1 << 20))
        assert largest_window(sizes, needed, 1) == window
        assert largest_window(sizes, needed - 1, 1) < window


def test_the_page_says_what_fits_into_memory() -> None:
    head = re.search(r"^\| row group \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert head is not None
    lanes = [int(cell.split()[0]) for cell in head[1].split("|")]
    for size, *windows in table("row group"):
        sizes = sizes_of(256, int(size.split()[0]) << 20)
        for number, shown in zip(lanes, windows, strict=True):
            found = fit(sizes, 2 << 30, number, shuffle=True, pieces=True)
            pieces = -(-int(sizes.decoded_rows[0]) // found.piece_rows) if found.piece_rows else 1
            assert shown == f"{found.row_groups}" + (f" ({pieces})" if pieces > 1 else "")


def test_spread_is_that_of_the_rows() -> None:
    """The rows' own positions, spelled out, agree with what is computed from buckets."""
    order = Order(counts=np.full(24, 400), batch_size=50, lanes=2, window=4)
    positions: dict[int, list[int]] = {}
    for index in range(order.batches()):
        for group in order.batch(index)[0].tolist():
            positions.setdefault(group, []).append(index * 50 + 25)
    spread = np.mean([np.std(found) for found in positions.values()]) / order.rows * np.sqrt(12)
    assert mixing(order).spread == pytest.approx(spread, rel=0.1)


def test_edges() -> None:
    with pytest.raises(ValueError):
        mixing(Order(counts=np.array([], np.int64), batch_size=10))
    one = mixing(Order(counts=np.array([1]), batch_size=10, lanes=3))
    assert (one.shared, one.groups, one.spread) == (0, 1, 0)
