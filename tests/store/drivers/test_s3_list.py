"""Listings from S3, and from stores that imitate it: complete, or refused by name."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("botocore")

import pqcache
from pqcache.errors import SourceError
from pqcache.store.drivers import s3
from pqcache.store.drivers.s3 import S3Source
from pqcache.store.manifest import Identity, SourceFile
from tests.datasets import shop_table
from tests.store.drivers.fake_s3 import Answer, FakeS3, Query, fake_s3, page
from tests.store.drivers.web_server import Asked, reply, serving

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
def test_pages_are_followed_by_tokens_or_by_markers(next_page: str) -> None:
    for size in (1, 4, 5, 10):
        with fake_s3(paged(KEYS, size, next_page)) as fake:
            assert listed(fake) == [key.removeprefix("wh/") for key in KEYS]
            assert len(fake.queries) == -(-10 // size)
            only_first = all("list-type" not in query for query in fake.queries[1:])
            assert only_first is (next_page == "marker" or size == 10)


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
    "a page without an end": "part-000.parquet after wh/dt=1/part-005.parquet, out of order or repeated",
    "a page that repeats": "part-000.parquet after wh/dt=1/part-005.parquet, out of order or repeated",
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


def listing(modified: str = "2026-11-20T04:00:03.000Z", size: str = "3", comment: str = "") -> str:
    item = f"<Key>t/a.parquet</Key><LastModified>{modified}</LastModified><ETag>e</ETag><Size>{size}</Size>"
    head = "<Name>b</Name><IsTruncated>false</IsTruncated>"
    return f"<ListBucketResult>{comment}{head}<Contents>{item}</Contents></ListBucketResult>"


@pytest.mark.parametrize(("encoded", "key"), [("url", "t/a%20b%2Bc%25%C3%A9.parquet"), ("", "t/a b+c%é.parquet")])
def test_forms_of_keys_times_and_tags(encoded: str, key: str) -> None:
    space = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"' if encoded else ""
    pages: list[str] = []
    with fake_s3(lambda _: pages[-1], {}) as store, closing(S3Source("s3://b/t", store.options, 5)) as source:
        for day in ("2026-11-20T04:00:03.999Z", "2026-11-20T04:00:03+00:00", "20 Nov 2026 04:00:03 GMT"):
            for tag in ("e", '"e"', "&quot;e&quot;"):
                page = listing(day).replace("t/a.parquet", key).replace("<ETag>e<", f"<ETag>{tag}<")
                about = f"<ListBucketResult{space}><EncodingType>{encoded}</EncodingType>"
                pages.append(page.replace("<ListBucketResult>", about))
                assert list(source.list()) == [SourceFile("a b+c%é.parquet", Identity(3, 1_795_147_203 * 10**9, "e"))]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<html>log in</html>", "answers with something that is not a listing"),
        (listing()[:-30], "t: "),
        ("<Error><Code>AccessDenied</Code></Error>", r"access denied \(500 AccessDenied\)"),  # with status 200
        *((listing(size=size), "whose size or date cannot be read") for size in ("-1", "9" * 30, "9" * 5000)),
        *((listing(modified=date), "whose size or date cannot be read") for date in ("", "99999-01-01T00:00:00Z")),
        (listing(comment=f"<!--{'x' * (40 << 20)}-->"), "/t: the server's answer has more than 33,554,432 bytes"),
    ],
    ids=["html", "cut", "error", "negative", "huge", "digits", "undated", "far", "endless"],
)
def test_listings_that_make_no_sense_are_refused(page: str, said: str, tmp_path: Path) -> None:
    with fake_s3(lambda _: page, {"t/a.parquet": b"PAR"}) as store:
        with pytest.raises(SourceError, match=said) as error:
            pqcache.sync("s3://b/t", tmp_path / "cache", options=store.options, retries=0)
        assert "\n" not in str(error.value)


def test_a_web_page_in_place_of_an_object(tmp_path: Path) -> None:
    def page(_: Asked, handler: BaseHTTPRequestHandler) -> None:
        empty = b"<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
        reply(handler, empty if "list-type" in handler.path else b"<html>log in</html>")

    with serving(page) as server:
        options = {"endpoint": server.url, "key": "k", "secret": "s", "addressing": "path"}
        with pytest.raises(SourceError, match="answers without LastModified, as S3 never does"):
            pqcache.sync("s3://b/t/a.parquet", tmp_path / "cache", options=options, retries=0)
