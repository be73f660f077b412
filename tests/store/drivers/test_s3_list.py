"""Listings from S3: the entries are those that botocore would have parsed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from datetime import datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("botocore")

import botocore.session
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import ClientError

import pqcache
from pqcache.errors import SourceError
from pqcache.store.drivers.s3 import S3Source, entries, take_entries
from pqcache.store.manifest import Identity
from tests.examples import examples
from tests.store.drivers.fake_s3 import fake_s3
from tests.store.drivers.web_server import Asked, reply, serving

if TYPE_CHECKING:
    from tests.conftest import Bucket

SPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
Item = Mapping[str, str]


class Canned:
    """A client whose listings are all answered with ``body``, without a server."""

    def __init__(self, taking: bool) -> None:
        self.body, self.status = b"", 200
        session = botocore.session.Session()
        session.set_credentials("key", "secret")
        once = Config(retries={"total_max_attempts": 1, "mode": "standard"})
        where = {"region_name": "us-east-1", "endpoint_url": "http://127.0.0.1:1"}
        self.client = session.create_client("s3", config=once, **where)
        if taking:
            take_entries(self.client)
        self.client.meta.events.register("before-send.s3", self._answer)

    def page(self, body: str, status: int = 200) -> Any:
        self.body, self.status = body.encode(), status
        return self.client.list_objects_v2(Bucket="b")

    def _answer(self, request: Any, **_: Any) -> AWSResponse:
        raw = io.BytesIO(self.body)
        raw.stream = lambda *_: iter([raw.read()])  # type: ignore[attr-defined]
        return AWSResponse(request.url, self.status, {}, raw)


@pytest.fixture(scope="module")
def clients() -> Iterator[tuple[Canned, Canned]]:
    both = Canned(taking=True), Canned(taking=False)
    yield both
    for canned in both:
        canned.client.close()


def body_of(items: list[Item], space: str = SPACE, encoding: str = "url", rest: str = "") -> str:
    fields = ("".join(f"<{name}>{escape(value)}</{name}>" for name, value in item.items()) for item in items)
    contents = "".join(f"<Contents>{item}</Contents>" for item in fields)
    about = f"<EncodingType>{encoding}</EncodingType>" if encoding else ""
    head = f"<Name>b</Name>{about}<IsTruncated>true</IsTruncated>"
    return f'<?xml version="1.0"?><ListBucketResult{space}>{head}{contents}{rest}</ListBucketResult>'


def item_of(key: str, size: int = 3, modified: str = "2026-11-20T04:00:03.000Z", etag: str = '"e-1"') -> Item:
    return {"Key": quote_plus(key), "LastModified": modified, "ETag": etag, "Size": str(size), "StorageClass": "X"}


def by_botocore(page: Any) -> list[tuple[str, Identity]]:
    return [
        (item["Key"], Identity(item["Size"], int(item["LastModified"].timestamp()) * 10**9, item["ETag"].strip('"')))
        for item in page.get("Contents", ())
    ]


_TIMES = st.builds(
    datetime.strftime,
    st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1)),
    st.sampled_from(
        ["%Y-%m-%dT%H:%M:%S.000Z", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S+00:00", "%d %b %Y %H:%M:%S GMT"]
    ),
)
_ITEMS = st.builds(
    item_of, st.text(st.characters(codec="utf-8"), min_size=1), st.integers(0, 2**62), _TIMES, st.text("abc\"'<&-0")
)


@settings(max_examples=examples(50))
@given(st.lists(_ITEMS, max_size=5), st.sampled_from(["", SPACE]), st.sampled_from(["url", ""]))
def test_entries_are_those_of_botocore(
    clients: tuple[Canned, Canned], items: list[Item], space: str, encoding: str
) -> None:
    rest = "<NextContinuationToken>more</NextContinuationToken><KeyCount>7</KeyCount>"
    ours, plain = (canned.page(body_of(items, space, encoding, rest)) for canned in clients)
    assert "Contents" not in ours, "botocore still parses the entries"
    assert list(entries(ours)) == by_botocore(plain)
    for name in ("IsTruncated", "NextContinuationToken", "Name", "KeyCount"):
        assert ours[name] == plain[name]


def test_entries_that_botocore_parsed_are_read(clients: tuple[Canned, Canned]) -> None:
    page = clients[1].page(body_of([item_of("a b+c%"), item_of("x")]))
    assert "Contents" in page
    assert list(entries(page)) == by_botocore(page)


@pytest.mark.parametrize(
    ("body", "status", "is_error"),
    [
        ("<Error><Code>SlowDown</Code></Error>", 503, True),
        ("<Error><Code>NoSuchBucket</Code></Error>", 404, True),
        ("<Error><Code>InternalError</Code></Error>", 200, True),  # S3 does that
        (body_of([item_of("a")])[:-30], 200, True),
        ("", 200, False),
        ("<html/>", 200, False),
    ],
)
def test_responses_without_a_listing_are_left_to_botocore(
    body: str, status: int, is_error: bool, clients: tuple[Canned, Canned]
) -> None:
    said = []
    for canned in clients:
        if is_error:
            with pytest.raises(ClientError) as found:
                canned.page(body, status)
            said.append(str(found.value))
        else:
            assert list(entries(canned.page(body, status))) == []
    assert len(set(said)) <= 1


@pytest.mark.s3
def test_several_pages_of_a_real_store(s3_bucket: Bucket) -> None:
    names = [f"dt={day}/part {number:03d}+%&é.parquet" for day in range(3) for number in range(5)]
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


def listing(modified: str = "2026-11-20T04:00:03.000Z", size: str = "3", comment: str = "") -> str:
    item = f"<Key>t/a.parquet</Key><LastModified>{modified}</LastModified><ETag>e</ETag><Size>{size}</Size>"
    head = "<Name>b</Name><IsTruncated>false</IsTruncated>"
    return f"<ListBucketResult>{comment}{head}<Contents>{item}</Contents></ListBucketResult>"


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<html>log in</html>", "answers with something that is no listing"),
        ("", "answers with something that is no listing"),
        *((listing(size=size), "whose size or date cannot be read") for size in ("x", "-1", "9" * 30, "9" * 5000)),
        *(
            (listing(modified=date), "whose size or date cannot be read")
            for date in ("", "soon", "99999-01-01T00:00:00Z")
        ),
        (listing(comment=f"<!--{'x' * (40 << 20)}-->"), "/t: the server's answer has more than 33,554,432 bytes"),
    ],
    ids=["html", "empty", "text", "negative", "huge", "digits", "undated", "soon", "far", "endless"],
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
