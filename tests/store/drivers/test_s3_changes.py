"""Files on S3 that change or vanish while a sync copies them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import SourceIncomplete
from pqcache.events import Event, Fetched
from pqcache.store.drivers.s3 import S3Source
from tests.datasets import rows_of, shop_table

if TYPE_CHECKING:
    from tests.conftest import Bucket

pytestmark = pytest.mark.s3


def put(bucket: Bucket, path: str, data: bytes) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key=f"wh/{path}", Body=data)


def make_table(bucket: Bucket, directory: Path, files: int) -> list[str]:
    names = [f"dt=2026-11-{1 + n % 3:02d}/part-{n:05d}.parquet" for n in range(files)]
    for number, name in enumerate(names):
        put_table(bucket, directory, name, number * 10)
    return names


def put_table(bucket: Bucket, directory: Path, name: str, first: int) -> None:
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(shop_table(first, 10), directory / name)
    put(bucket, name, (directory / name).read_bytes())


def acting_once(change: Callable[[], Any], on: str) -> Callable[[Event], None]:
    """Return a callback that changes the source as soon as ``on`` has been fetched."""
    done: list[Event] = []

    def on_event(event: Event) -> None:
        if isinstance(event, Fetched) and event.path == on and not done:
            done.append(event)
            change()

    return on_event


@pytest.mark.parametrize("size", [None, 1 << 20])
def test_a_file_that_changes_after_its_copy_is_fetched_again(
    size: int | None, s3_bucket: Bucket, tmp_path: Path
) -> None:
    """Seen by the listing that comes after all copies, whether files are rewritten or not."""
    made = tmp_path / "made"
    names = make_table(s3_bucket, made, 30)
    first = sorted(names)[0]
    on_event = acting_once(lambda: put_table(s3_bucket, made, first, 5000), first)
    pqcache.sync(f"{s3_bucket.url}/wh", tmp_path / "cache", row_group_size=size, on_event=on_event)
    assert rows_of(tmp_path / "cache" / "current") == rows_of(made)
    report = pqcache.sync(tmp_path / "cache")
    assert not report.published, "what was recorded is the version that was fetched"
    assert sorted(os.listdir(tmp_path / "cache" / "tmp")) == []


def test_a_file_that_vanishes_after_its_copy_is_left_out(s3_bucket: Bucket, tmp_path: Path) -> None:
    made = tmp_path / "made"
    first = sorted(make_table(s3_bucket, made, 30))[0]
    on_event = acting_once(lambda: s3_bucket.client.delete_object(Bucket=s3_bucket.name, Key=f"wh/{first}"), first)
    pqcache.sync(f"{s3_bucket.url}/wh", tmp_path / "cache", on_event=on_event)
    (made / first).unlink()
    assert rows_of(tmp_path / "cache" / "current") == rows_of(made)


def test_a_file_that_never_holds_still_publishes_nothing(
    s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    first = sorted(make_table(s3_bucket, made, 30))[0]
    real, turn = S3Source.list, iter(range(100))

    def listed(self: S3Source) -> Iterator[Any]:
        put_table(s3_bucket, made, first, 10_000 + 10 * next(turn))
        yield from real(self)

    monkeypatch.setattr(S3Source, "list", listed)
    with pytest.raises(SourceIncomplete, match=f"keeps changing while it is copied, last {first}"):
        pqcache.sync(f"{s3_bucket.url}/wh", tmp_path / "cache")
    assert not (tmp_path / "cache" / "current").exists()
