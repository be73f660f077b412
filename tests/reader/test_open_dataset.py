"""Opening plain files, which may be replaced, and paths into a snapshot, which may be removed."""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import CacheError, ParquetError, UsageError
from pqcache.reader.open_dataset import Files, open_local_dataset
from pqcache.system import disk
from tests.datasets import write_day


def write(path: Path, first: int, rows: int = 100) -> None:
    """Write a file; another ``first`` gives one of the same layout and size."""
    table = pa.table({"id": pa.array(range(first, first + rows), pa.int64())})
    pq.write_table(table, path, use_dictionary=False, compression="none", write_statistics=False)


def in_place(path: Path) -> None:
    content = path.with_name("other")
    write(content, 1000)
    path.write_bytes(content.read_bytes())
    content.unlink()


def by_rename(path: Path) -> None:
    write(path.with_name("other"), 1000)
    path.with_name("other").rename(path)


def by_rename_with_its_time(path: Path) -> None:
    before = path.stat()
    by_rename(path)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


REPLACED = [in_place, by_rename, by_rename_with_its_time]


@pytest.mark.parametrize("replace", REPLACED)
def test_a_plain_file_that_was_replaced_is_an_error(replace: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, 0)
    data, lease = open_local_dataset(tmp_path)
    assert lease is None
    files = Files(data)
    list(files.parts(files.group(0), ["id"]))
    replace(path)
    with pytest.raises(ParquetError, match=r"a\.parquet: was replaced or written to since the dataset was opened"):
        list(files.parts(files.group(0), ["id"]))
    if replace is by_rename_with_its_time:  # as a copy on another node
        return
    assert open_local_dataset(tmp_path)[0].snapshot != data.snapshot
    with pytest.raises(UsageError, match="its files differ from those of files-"):
        open_local_dataset(tmp_path, data.snapshot)


def test_a_plain_file_that_is_replaced_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, 0, rows=100_000)
    files = Files(open_local_dataset(path)[0])
    parts = files.parts(files.group(0), ["id"])
    next(parts)
    by_rename(path)
    with pytest.raises(ParquetError, match="was replaced"):
        list(parts)


def test_inode_numbers_that_may_change_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    write(path, 0)
    text = f"1 0 0:99 / /m rw - fuse.gcsfuse x rw\n2 0 {os.major(77)}:{os.minor(77)} / /n rw - ext4 x rw\n"
    disk.has_lasting_inodes.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", lambda *_, **__: io.StringIO(text))
        assert not disk.has_lasting_inodes(os.makedev(0, 99))
        assert disk.has_lasting_inodes(77)
    monkeypatch.setattr("pqcache.reader.open_dataset.has_lasting_inodes", lambda _: False)
    data, _ = open_local_dataset(tmp_path)
    disk.has_lasting_inodes.cache_clear()
    shutil.copy2(path, tmp_path / "copy")
    (tmp_path / "copy").rename(path)
    assert open_local_dataset(tmp_path)[0].snapshot == data.snapshot


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    for day in (1, 2):
        write_day(tmp_path / "lake", f"2026-11-0{day}", files=2, rows=40, first=day * 1000)
    pqcache.sync(str(tmp_path / "lake"), tmp_path / "cache", keep=1)
    return tmp_path / "cache"


def publish(cache: Path, seed: int) -> None:
    write_day(cache.parent / "lake", "2026-11-01", files=2, rows=40, first=1000, seed=seed)
    assert pqcache.sync(cache).published


PARTS = ["current/dt=2026-11-01", "current/dt=2026-11-01/part-00000.parquet"]


@pytest.mark.parametrize("part", PARTS)
def test_a_path_into_a_snapshot_leads_to_it_and_leases_it(part: str, cache: Path) -> None:
    held = (cache / "current").resolve()
    data, lease = open_local_dataset(cache / part)
    assert lease is not None
    assert data.root == (held / Path(part).relative_to("current")) or part.endswith(".parquet")
    rows = data.index.rows.sum()
    publish(cache, 1)
    publish(cache, 2)
    assert held.exists(), "it is leased"
    files = Files(data)
    parts = (part for number in range(len(data.index)) for part in files.parts(files.group(number), ["id"]))
    assert sum(part.num_rows for part in parts) == rows
    lease.close()
    publish(cache, 3)
    assert not held.exists()


@pytest.mark.parametrize("name", ["files.arrow", "row_groups.arrow"])
def test_a_snapshot_without_a_file_of_its_own_is_not_taken_for_plain_files(name: str, cache: Path) -> None:
    held = (cache / "current").resolve()
    (held / "_pqcache" / name).unlink()
    if name == "row_groups.arrow":
        with pytest.raises(CacheError, match=name):
            open_local_dataset(cache / "current")
    else:
        data, lease = open_local_dataset(cache / "current")
        assert data.snapshot == held.name
        assert lease is not None
        lease.close()
        with pytest.raises(CacheError, match=name):
            pqcache.sync(cache / "current", cache.parent / "other")


def test_what_is_not_there_in_a_snapshot_is_named_and_leases_nothing(cache: Path) -> None:
    held = (cache / "current").resolve()
    with pytest.raises(UsageError, match="no such file or directory"):
        open_local_dataset(cache / "current" / "dt=1999-01-01")
    with pytest.raises(UsageError, match="its files differ from those"):
        open_local_dataset(cache / "current" / "dt=2026-11-01", "files-0")
    publish(cache, 1)
    publish(cache, 2)
    assert not held.exists()
    (cache / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="no such file"):
        open_local_dataset(cache / "loop")


def test_a_copy_of_a_snapshot_needs_no_lease(cache: Path, tmp_path: Path) -> None:
    shutil.copytree((cache / "current").resolve(), tmp_path / "copy")
    (tmp_path / "copy" / "_pqcache" / "lease").unlink()
    assert open_local_dataset(tmp_path / "copy")[1] is None
    assert open_local_dataset(tmp_path / "copy" / "dt=2026-11-01")[1] is None


def test_a_snapshot_that_is_replaced_while_it_is_opened_is_not_an_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pqcache.Snapshot.lease
    calls = []

    def lease(self: pqcache.Snapshot) -> object:
        calls.append(self.id)
        if len(calls) == 1:
            publish(cache, 1)
            publish(cache, 2)
            raise CacheError(self.path, "the snapshot is gone")
        return real(self)

    monkeypatch.setattr(pqcache.Snapshot, "lease", lease)
    data, held = open_local_dataset(cache / "current" / "dt=2026-11-01")
    assert held is not None
    assert len(set(calls)) == 2
    assert data.root.parent == (cache / "current").resolve()
    held.close()


def test_a_snapshot_whose_index_cannot_be_read_is_not_leased(cache: Path) -> None:
    own = cache / "current" / "_pqcache"
    (own / "row_groups.arrow").chmod(0o644)
    (own / "row_groups.arrow").write_bytes(b"no index")
    with pytest.raises(CacheError, match="row-group index") as caught:
        open_local_dataset(cache)
    with (own / "lease").open("rb") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert caught.value.exit_code == 4  # and until here its frames live, with all that they have opened
