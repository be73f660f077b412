"""Listings from S3 by botocore's client, but for their entries, of which it takes 0.05 ms of CPU each to parse.

What it spends there is dates above all, and looking up the shape of every field. So the entries are taken out of each
answer before it is parsed, and the rest is left to it: errors, retries, paging, how keys are encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from botocore.utils import parse_timestamp

from pqcache.store.manifest import Identity

_TAKEN = "pqcache"  # under which a page has its entries


def take_entries(client: Any) -> None:
    """Have every page of ``list_objects_v2`` of a client's carry its entries as ``entries`` reads them."""
    client.meta.events.register("before-parse.s3.ListObjectsV2", _take)


def entries(page: Mapping[str, Any]) -> Iterator[tuple[str, Identity]]:
    """Yield key and identity of all objects on a page."""
    if _TAKEN not in page:  # a botocore that does not ask before it parses
        for item in page.get("Contents", ()):
            yield item["Key"], identity(item["Size"], item["LastModified"], item["ETag"])
        return
    encoded = page.get("EncodingType") == "url"
    for fields in page[_TAKEN]:
        key = fields["Key"]
        if encoded:
            slash = "%2F" if "%2F" in key else "/"  # Ceph encodes it, Amazon does not
            directory, slash, name = key.rpartition(slash)
            key = _decoded(directory + slash) + unquote_plus(name)
        yield key, Identity(int(fields["Size"]), _nanoseconds(fields["LastModified"]), fields["ETag"].strip('"'))


def identity(size: int, modified: datetime, etag: str) -> Identity:
    """Return an identity from what botocore has parsed."""
    return Identity(size, int(modified.timestamp()) * 1_000_000_000, etag.strip('"'))


def _take(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any) -> None:
    if response_dict["status_code"] >= 300:
        return
    try:
        root = ElementTree.fromstring(response_dict["body"])
    except ElementTree.ParseError:
        return  # botocore says what is wrong with it
    space = root.tag.rpartition("ListBucketResult")[0]
    if root.tag != f"{space}ListBucketResult":
        return
    skip, contents = len(space), f"{space}Contents"
    found = [{child.tag[skip:]: child.text or "" for child in item} for item in root.iter(contents)]
    if not all(fields.keys() >= {"Key", "Size", "LastModified", "ETag"} for fields in found):
        return
    rest = ElementTree.Element(root.tag)
    rest.extend(child for child in root if child.tag != contents)
    response_dict["body"] = ElementTree.tostring(rest)
    customized_response_dict[_TAKEN] = found


_decoded = lru_cache(1024)(unquote_plus)


@lru_cache(1024)
def _nanoseconds(text: str) -> int:
    """Return a time like 2026-11-20T04:00:03.000Z in nanoseconds since 1970, whole seconds as in ``identity``."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        moment = parse_timestamp(text)
    return int(moment.timestamp()) * 1_000_000_000
