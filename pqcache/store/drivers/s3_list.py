"""Parses the entries of S3 listings, which botocore's client does slowly, with dates and shapes for every field.

An event handler takes the entries out of each response before the client parses it. The rest is the client's: errors,
retries, paging, the encoding of keys. A response in which the entries are not found is left to the client as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from botocore.utils import parse_timestamp

from pqcache.store.manifest import Identity

log = logging.getLogger("pqcache.store")

_ENTRIES = "pqcache"  # the key of a page under which the handler puts them


def take_entries(client: Any) -> None:
    """Make a client put the entries of ``list_objects_v2`` where ``entries`` finds them."""
    client.meta.events.register("before-parse.s3.ListObjectsV2", _take)


def entries(page: Mapping[str, Any]) -> Iterator[tuple[str, Identity]]:
    """Yield the key and the identity of each object on a page."""
    if _ENTRIES not in page:  # an unknown response, or a botocore without the event
        if page.get("Contents"):
            log.debug("s3: botocore parsed the entries of a listing")
        for item in page.get("Contents", ()):
            yield item["Key"], identity(item["Size"], item["LastModified"], item["ETag"])
        return
    encoded = page.get("EncodingType") == "url"
    for fields in page[_ENTRIES]:
        key = fields["Key"]
        if encoded:
            slash = "%2F" if "%2F" in key else "/"  # Ceph encodes a slash, Amazon does not
            directory, slash, name = key.rpartition(slash)
            key = _decoded(directory + slash) + unquote_plus(name)
        yield key, Identity(int(fields["Size"]), _nanoseconds(fields["LastModified"]), fields["ETag"].strip('"'))


def identity(size: int, modified: datetime, etag: str) -> Identity:
    """Return the identity of an object from values that botocore has parsed."""
    return Identity(size, int(modified.timestamp()) * 1_000_000_000, etag.strip('"'))


def _take(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any) -> None:
    if response_dict["status_code"] >= 300:
        return
    try:
        root = ElementTree.fromstring(response_dict["body"])
    except ElementTree.ParseError:
        return  # botocore reports it
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
    customized_response_dict[_ENTRIES] = found


_decoded = lru_cache(1024)(unquote_plus)


@lru_cache(1024)
def _nanoseconds(text: str) -> int:
    """Return a time like 2026-11-20T04:00:03.000Z in nanoseconds since 1970, rounded down to a second."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        moment = parse_timestamp(text)
    return int(moment.timestamp()) * 1_000_000_000
