"""A source that is listed again is not checked again while it is the same; links in a source give no row twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import UsageError
from pqcache.events import Event, Warned, ignore
from pqcache.store.drivers.local import LocalSource
from pqcache.store.sync.listing import list_source
from pqcache.torch import ParquetDataset


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    for name in ("dt=1/a.parquet", "dt=2/b.parquet"):
        (tmp_path / name).parent.mkdir()
        pq.write_table(pa.table({"id": [1]}), tmp_path / name)
    return tmp_path


def test_a_table_above_is_seen_though_no_file_has_changed(lake: Path) -> None:
    source = LocalSource(str(lake / "dt=1"), {})
    first = list_source(source, ignore)
    (lake / "_delta_log").mkdir()
    (lake / "_delta_log/00000000000000000000.json").write_text("{}\n")
    with pytest.raises(UsageError, match="Delta"):
        list_source(source, ignore, before=first)


def nested(lake: Path) -> None:
    """Links in a linked directory: back into the lake, to the directory itself, and to one above both."""
    outside = lake.parent / "outside"
    (outside / "dt=3").mkdir(parents=True)
    pq.write_table(pa.table({"id": [3]}), outside / "dt=3/c.parquet")
    (lake / "more").symlink_to(outside)
    (outside / "back").symlink_to(lake)
    (outside / "self").symlink_to(".")
    (outside / "up").symlink_to(lake.parent)


def outside_twice(lake: Path) -> None:
    nested(lake)
    (lake / "again").symlink_to(lake.parent / "outside")
    (lake / "dt=3").symlink_to(lake.parent / "outside/dt=3")


def outside_file_twice(lake: Path) -> None:
    pq.write_table(pa.table({"id": [3]}), lake.parent / "c.parquet")
    for name in ("a.parquet", "dt=2/z.parquet"):
        (lake / name).symlink_to(lake.parent / "c.parquet")


def hidden(lake: Path) -> None:
    """As of mounted volumes: what a visible link leads to is hidden by itself, and is taken once."""
    (lake / "..data/dt=3").mkdir(parents=True)
    pq.write_table(pa.table({"id": [3]}), lake / "..data/dt=3/c.parquet")
    (lake / "current").symlink_to("..data")
    (lake / "zurrent").symlink_to("..data")
    (lake / ".current").symlink_to(".")


def hard_links(lake: Path) -> None:
    """One in another partition is not the same: programs that look for equal files make such."""
    os.link(lake / "dt=1/a.parquet", lake / "latest.parquet")
    os.link(lake / "dt=1/a.parquet", lake / "dt=1/b.parquet")
    (lake / "dt=2").rename(lake / "dt=3")
    (lake / "dt=2").mkdir()
    os.link(lake / "dt=3/b.parquet", lake / "dt=2/b.parquet")


def links(lake: Path) -> None:
    """To a directory, a partition, the source itself, what is above, a file, and one of another partition."""
    for path, target in (
        ("latest", "dt=2"), ("dt=9", "dt=2"), ("absolute", str(lake / "dt=2")), ("current", "."), ("dt=1/up", ".."),
        ("latest.parquet", "dt=2/b.parquet"), ("dt=1/b.parquet", "../dt=2/b.parquet"),
    ):  # fmt: skip
        (lake / path).symlink_to(target)


LINKS: dict[str, tuple[Callable[[Path], None], list[int], int]] = {  # what makes them, all rows, how many are left out
    "links": (links, [1, 1], 7),
    "other data": (lambda lake: (lake / "latest.txt").symlink_to("dt=2/b.parquet"), [1, 1], 0),
    "nested": (nested, [1, 1, 3], 4),
    "outside twice": (outside_twice, [1, 1, 3], 6),
    "outside file twice": (outside_file_twice, [1, 1, 3], 1),
    "hidden": (hidden, [1, 1, 3], 1),
    "hard links": (hard_links, [1, 1, 1], 2),
}


@pytest.mark.parametrize("what", LINKS)
def test_links_give_no_row_twice(what: str, tmp_path: Path) -> None:
    lake = tmp_path / "x" / "lake"
    for name in ("dt=1/a.parquet", "dt=2/b.parquet"):
        (lake / name).parent.mkdir(parents=True)
        pq.write_table(pa.table({"id": [1]}), lake / name)
    make, ids, left_out = LINKS[what]
    make(lake)
    events: list[Event] = []
    report = pqcache.sync(lake, tmp_path / "cache", on_event=events.append)
    assert report.passed_over is not None
    assert (report.rows, report.passed_over.links) == (len(ids), left_out)
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert [" left out: " in warning for warning in warnings] == [True] * bool(left_out)
    for batch in pqcache.Cache.open(tmp_path / "cache").batches(shuffle=False, batch_size=100):
        assert sorted(batch["id"].to_pylist()) == ids
    assert pqcache.inspect(lake).rows == len(ids)
    assert not pqcache.sync(tmp_path / "cache").published


@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_directory_that_is_read_in_place(lake: Path) -> None:
    (lake / "latest").symlink_to("dt=2")
    (lake / "current").symlink_to(".")
    (lake / "latest.parquet").symlink_to("dt=2/b.parquet")
    assert len(ParquetDataset(lake, batch_size=None)) == 2
