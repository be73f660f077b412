"""A source that is listed again: what is the same is not checked again, and anything else is."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import SourceError, UsageError
from pqcache.events import ignore
from pqcache.store.drivers.local import LocalSource
from pqcache.store.sync.listing import list_source


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    for name in ("dt=1/a.parquet", "dt=2/b.parquet"):
        (tmp_path / name).parent.mkdir()
        pq.write_table(pa.table({"id": [1]}), tmp_path / name)
    return tmp_path


def test_an_equal_listing_is_the_one_before(lake: Path) -> None:
    first = list_source(LocalSource(str(lake), {}), ignore)
    assert list_source(LocalSource(str(lake), {}), ignore, before=first) is first


@pytest.mark.parametrize("changed", ["dt=1/a.parquet", "dt=3/c.parquet", "dt=1/_SUCCESS"])
def test_a_change_is_seen(lake: Path, changed: str) -> None:
    first = list_source(LocalSource(str(lake), {}), ignore)
    (lake / changed).parent.mkdir(exist_ok=True)
    (lake / changed).write_bytes((lake / "dt=2/b.parquet").read_bytes() + b"more")
    now = list_source(LocalSource(str(lake), {}), ignore, before=first)
    assert changed in now.paths
    assert now.found != first.found


def test_a_removed_file_is_seen(lake: Path) -> None:
    first = list_source(LocalSource(str(lake), {}), ignore)
    (lake / "dt=1/a.parquet").unlink()
    assert list_source(LocalSource(str(lake), {}), ignore, before=first).paths == ["dt=2/b.parquet"]


def test_a_new_name_is_checked(lake: Path) -> None:
    first = list_source(LocalSource(str(lake), {}), ignore)
    (lake / "dt=1/a\n.parquet").write_bytes(b"")
    with pytest.raises(SourceError, match="control character"):
        list_source(LocalSource(str(lake), {}), ignore, before=first)


def test_a_table_above_is_seen_though_no_file_has_changed(lake: Path) -> None:
    source = LocalSource(str(lake / "dt=1"), {})
    first = list_source(source, ignore)
    (lake / "_delta_log").mkdir()
    (lake / "_delta_log/00000000000000000000.json").write_text("{}\n")
    with pytest.raises(UsageError, match="Delta"):
        list_source(source, ignore, before=first)
