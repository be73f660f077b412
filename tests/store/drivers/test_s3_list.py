"""Listings from S3: several pages, all forms of keys and times, and answers that are no listing."""

from __future__ import annotations

from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("botocore")


import pqcache
from pqcache.errors import SourceError
from pqcache.store.drivers.s3 import S3Source
from pqcache.store.manifest import Identity, SourceFile
from tests.store.drivers.fake_s3 import fake_s3
from tests.store.drivers.web_server import Asked, reply, serving

if TYPE_CHECKING:
    from tests.conftest import Bucket


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


@pytest.mark.s3
def test_several_pages_of_a_real_store(s3_bucket: Bucket) -> None:
    names = [f"dt={day}/part {number:03d}+%&é\"'<.parquet" for day in range(3) for number in range(5)]
    for name in names:
        s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=f"wh/{name}", Body=name.encode())
    source = S3Source(f"{s3_bucket.url}/wh", {}, 5)
    source._lister.meta.events.register(
        "before-parameter-build.s3.ListObjectsV2", lambda params, **_: params.update(MaxKeys=4)
    )
    pages: list[str] = []
    source._lister.meta.events.register("before-call.s3", lambda model, **_: pages.append(model.name))
    listed = {file.path: file.identity for file in source.list()}
    assert list(listed) == sorted(names)
    assert len(pages) == 4
    assert all(listed[name] == source.stat(name) for name in names)
    source.close()


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<html>log in</html>", "answers with something that is not a listing"),
        ("", "answers with something that is not a listing"),
        (listing()[:-30], "t: "),
        (
            "<Error><Code>AccessDenied</Code></Error>",
            r"access denied \(500 AccessDenied\)",
        ),  # S3 has errors of status 200
        *((listing(size=size), "whose size or date cannot be read") for size in ("x", "-1", "9" * 30, "9" * 5000)),
        *(
            (listing(modified=date), "whose size or date cannot be read")
            for date in ("", "soon", "99999-01-01T00:00:00Z")
        ),
        (listing(comment=f"<!--{'x' * (40 << 20)}-->"), "/t: the server's answer has more than 33,554,432 bytes"),
    ],
    ids=["html", "empty", "cut", "error", "text", "negative", "huge", "digits", "undated", "soon", "far", "endless"],
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
