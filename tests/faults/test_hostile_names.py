"""Names that lead out of the cache, break a line or clash are refused by name, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pqcache
from pqcache.store.sync import safety_checks
from tests.examples import PROFILE
from tests.faults.checks import check_snapshot, rows_at
from tests.faults.lakes import big, lake_of, state_of

if TYPE_CHECKING:
    from tests.conftest import Bucket


HOSTILE = [
    "../evil.parquet",
    "dt=1/../../evil.parquet",
    "dt=1/./evil.parquet",
    "/evil.parquet",
    "dt=1//evil.parquet",
    "dt=1/ev\nil.parquet",
    "dt=1/ev\ril.parquet",
    "dt=1/ev\til.parquet",
    "dt=1/ev\x01il.parquet",
    "dt=1/ev\x7fil.parquet",
    "dt=1/\x1b[31mevil.parquet",
    "dt=1/ok.parquet/evil.parquet",
    f"dt=1/{'e' * 300}.parquet",
    "_hidden/../../evil.parquet",
]


@pytest.mark.s3
def test_hostile_keys_in_a_real_bucket(s3_bucket: Bucket, tmp_path: Path) -> None:
    """Each is refused by name, on one line, and nothing is written or published."""
    house = tmp_path / "house"
    cache = house / "cache"
    content = big(1, 10)
    prefix = "wh/shop/"
    s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=f"{prefix}dt=1/ok.parquet", Body=content)
    pqcache.sync(f"{s3_bucket.url}/wh/shop", cache, partition_types={"dt": "text"})
    before = state_of(house / "cache" / "snapshots")
    for number, key in enumerate(HOSTILE if PROFILE == "deep" else HOSTILE[::3]):
        s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=prefix + key, Body=content)
        with pytest.raises(pqcache.SourceError) as error:
            pqcache.sync(f"{s3_bucket.url}/wh/shop", house / "new" if number % 2 else cache)
        message = str(error.value)
        assert message.isprintable(), f"{message!r}"
        assert "rename" in message
        assert any(name in message for name in ("il.parquet", "eee", "ok.parquet"))
        s3_bucket.client.delete_object(Bucket=s3_bucket.name, Key=prefix + key)
        assert state_of(house / "cache" / "snapshots") == before
        assert {path.name for path in house.iterdir()} <= {"cache", "new"}
        assert not (house / "new" / "current").exists()
    for key in ("dt=2026%2F11/a b.parquet", "dt=1/ü'\"$(touch x);*?[a].parquet"):
        s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=prefix + key, Body=content)
    report = pqcache.sync(cache)
    assert report.files == 3
    assert (cache / "current" / "dt=2026%2F11" / "a b.parquet").read_bytes() == content
    assert not pqcache.sync(cache).published


def test_a_local_name_that_is_no_text(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    pqcache.sync(str(lake), cache)
    old = rows_at(lake)
    odd = os.fsencode(lake / "dt=2026-11-01") + b"/ev\xffil.parquet"
    with open(odd, "wb") as file:
        file.write(big(1, 10))
    with pytest.raises(pqcache.SourceError, match=r"il\.parquet") as error:
        pqcache.sync(cache)
    assert str(error.value).encode()
    assert check_snapshot(cache, [old]) == 0


@pytest.mark.parametrize(
    "names",
    [
        ("dt=1/Part.parquet", "dt=1/part.parquet"),
        ("r=US/a.parquet", "r=us/b.parquet"),
    ],
    ids=["files", "values"],
)
def test_names_that_differ_only_in_case(
    names: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are taken where the file system tells them apart; refused by name where it does not."""
    lake = tmp_path / "lake"
    for number, name in enumerate(names):
        (lake / name).parent.mkdir(parents=True, exist_ok=True)
        (lake / name).write_bytes(big(number, 10))
    if sorted(os.listdir(lake)) == sorted({name.partition("/")[0] for name in names}):
        pqcache.sync(str(lake), tmp_path / "cache")
        assert check_snapshot(tmp_path / "cache", [rows_at(lake)]) == 0
    monkeypatch.setattr(safety_checks, "folds_case", lambda directory: True)
    with pytest.raises(pqcache.SourceError, match="case"):
        pqcache.sync(str(lake), tmp_path / "other")
    assert not (tmp_path / "other" / "current").exists()
