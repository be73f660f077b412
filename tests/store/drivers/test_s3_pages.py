"""Listings of stores that imitate S3: complete, or refused by name."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("botocore")

import pqcache
from pqcache.errors import SourceError
from pqcache.store.drivers import s3
from pqcache.store.drivers.s3 import S3Source
from tests.datasets import shop_table
from tests.store.drivers.fake_s3 import Answer, FakeS3, Query, fake_s3, page

KEYS = [f"wh/dt=1/part-{n:03d}.parquet" for n in range(10)]
TOKEN = "<NextContinuationToken>{}</NextContinuationToken>"


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1", prepend=",")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


def listed(fake: FakeS3, url: str = "s3://b/wh") -> list[str]:
    with closing(S3Source(url, fake.options, 5)) as source:
        return [file.path for file in source.list()]


def paged(keys: list[str], size: int, next_page: str) -> Answer:
    """Return a store that pages by ``marker``, ``token``, or both."""

    def answer(query: Query) -> str:
        after = query.get("marker") or query.get("continuation-token") or ""
        if next_page == "marker" and query.get("list-type") == "2" and "marker" not in query:
            after = ""  # version 1 knows no tokens
        left = [key for key in keys if key > after and key.startswith(query.get("prefix", ""))]
        rest = TOKEN.format(left[size - 1]) if next_page == "token" and len(left) > size else ""
        return page(left[:size], len(left) > size, rest)

    return answer


@pytest.mark.parametrize("next_page", ["token", "marker"])
@pytest.mark.parametrize("size", [1, 4, 5, 10])
def test_pages_are_followed_by_tokens_or_by_markers(next_page: str, size: int) -> None:
    with fake_s3(paged(KEYS, size, next_page)) as fake:
        assert listed(fake) == [key.removeprefix("wh/") for key in KEYS]
        assert len(fake.queries) == -(-10 // size)
        assert all("list-type" not in query for query in fake.queries[1:]) is (next_page == "marker" or size == 10)


def broken(name: str) -> Answer:
    """Return a store whose listing has a fault."""
    count = iter(range(10**9))
    more = TOKEN.format("more")

    def answer(query: Query) -> str:
        number = next(count)
        return {
            "no next page": page([], True),
            "a page without an end": page(KEYS[:6], True),
            "a page that repeats": page(KEYS[:6], True, more),
            "a key that repeats": page([*KEYS[:3], KEYS[2]]),
            "a key of the page before": page(KEYS[:3] if not number else KEYS[2:], not number, more),
            "no order": page([KEYS[1], KEYS[0]]),
            "another prefix": page(["wh-2/part-0.parquet"]),
            "endless keys": page([f"wh/{number:09d}.parquet"], True, TOKEN.format(number)),
            "endless empty pages": page([], True, TOKEN.format(number)),
            "no tag": page(KEYS[:2]).replace('<ETag>"e-1"</ETag>', ""),
        }[name]

    return answer


FAULTS = {
    "no next page": "ends in an empty page",
    "a page without an end": "part-000.parquet after wh/dt=1/part-005.parquet, out of order or once more",
    "a page that repeats": "part-000.parquet after wh/dt=1/part-005.parquet, out of order or once more",
    "a key that repeats": "lists wh/dt=1/part-002.parquet twice",
    "a key of the page before": "lists wh/dt=1/part-002.parquet twice",
    "no order": "lists wh/dt=1/part-000.parquet after wh/dt=1/part-001.parquet",
    "another prefix": "lists wh-2/part-0.parquet, which is not below it",
    "endless keys": "lists more than 20 keys",
    "endless empty pages": "has no end",
    "no tag": "lists an object without ETag",
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_listing_that_contradicts_itself_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "MAX_KEYS", 20)
    monkeypatch.setattr(s3, "MAX_EMPTY_PAGES", 5)
    with fake_s3(broken(name)) as fake, pytest.raises(SourceError) as error:
        pqcache.sync("s3://b/wh", tmp_path / "cache", options=fake.options, as_files=True)
    assert error.value.exit_code == 1
    assert error.value.subject == "s3://b/wh"
    assert FAULTS[name] in error.value.reason
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_a_directory_bucket_has_no_order() -> None:
    keys = [f"wh/{n}.parquet" for n in (3, 1, 2)]
    entries = s3.list_bucket(_Listing([page_of(keys)]), "b--x-s3", "wh/", {})
    assert [key for key, _ in entries] == keys
    with pytest.raises(SourceError, match=r"lists wh/1\.parquet twice"):
        list(s3.list_bucket(_Listing([page_of([*keys, keys[1]])]), "b--x-s3", "wh/", {}))


def page_of(keys: list[str]) -> dict[str, object]:
    found = [{"Key": key, "Size": "1", "LastModified": "2026-11-20T04:00:03Z", "ETag": "e"} for key in keys]
    return {"pqcache": found, "IsTruncated": False}


class _Listing:
    """A client that answers with these pages."""

    def __init__(self, pages: list[dict[str, object]]) -> None:
        self._pages: Iterator[dict[str, object]] = iter(pages)

    def list_objects_v2(self, **_: object) -> dict[str, object]:
        return next(self._pages)


def test_a_store_of_version_1_gives_all_rows(tmp_path: Path) -> None:
    data = io.BytesIO()
    pq.write_table(shop_table(0, 10), data)
    body = data.getvalue()
    answer = paged(KEYS, 6, "marker")
    with fake_s3(lambda q: answer(q).replace("<Size>3<", f"<Size>{len(body)}<"), dict.fromkeys(KEYS, body)) as fake:
        report = pqcache.sync("s3://b/wh", tmp_path / "cache", options=fake.options)
        assert (report.files, report.rows) == (10, 100)
        assert not pqcache.sync(tmp_path / "cache", options=fake.options).published
