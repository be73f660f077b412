"""Lists buckets of S3 page by page, and parses the entries, which botocore's client does slowly.

An event handler takes the entries out of each response before the client parses it. The rest is the client's: errors,
the encoding of keys. A response in which the entries are not found is left to the client as it is.

Stores that imitate S3 have listings that end too early or never. So every key has to come after the one before it, as
S3 promises, and a page that is not the last has to lead to another: by its token, or by its last key as in version 1 of
the API, which older stores answer with whatever they are asked.
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

from pqcache.errors import SourceError, first_line
from pqcache.store.manifest import Identity
from pqcache.store.urls import printable

log = logging.getLogger("pqcache.store")

_ENTRIES = "pqcache"  # the key of a page under which the handler puts them
_UNORDERED = "--x-s3"  # ends the names of directory buckets, whose listings have no order
_ADVICE = "the listing cannot be trusted: nothing was published, check the store, or list it with another tool"
MAX_KEYS = 20_000_000  # of a listing; more would not fit into memory
MAX_EMPTY_PAGES = 100  # in a row


class _KeyChecker:
    """Checks that each key of a listing is a new one below the prefix, and that keys come in order."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.last, self.count = "", 0
        self._place, self._prefix = f"s3://{bucket}/{prefix}".rstrip("/"), prefix
        self._seen: set[str] | None = set() if bucket.endswith(_UNORDERED) else None

    def check(self, key: str) -> None:
        """Raise SourceError where a key cannot be the next one."""
        if self._seen is not None:
            is_new = key not in self._seen
            self._seen.add(key)
        else:
            is_new = key > self.last or not self.count  # as their bytes in UTF-8
        if not is_new and (key == self.last or self._seen is not None):
            raise self.error(f"lists {printable(key)} twice")
        if not is_new:
            raise self.error(f"lists {printable(key)} after {printable(self.last)}, out of order or once more")
        if not key.startswith(self._prefix):
            raise self.error(f"lists {printable(key)}, which is not below it")
        self.last, self.count = key, self.count + 1
        if self.count > MAX_KEYS:
            raise SourceError(self._place, f"lists more than {MAX_KEYS:,} keys", "name a part of it")

    def error(self, reason: str) -> SourceError:
        """Return the error for a listing with this fault."""
        return SourceError(self._place, reason, _ADVICE)


def list_bucket(client: Any, bucket: str, prefix: str, extra: Mapping[str, str]) -> Iterator[tuple[str, Identity]]:
    """Yield the key and the identity of each object below ``prefix``; ``extra`` are parameters of each request.

    A listing that contradicts itself raises SourceError; the client's errors are raised as they are.
    """
    keys = _KeyChecker(bucket, prefix)
    request = {"Bucket": bucket, "Prefix": prefix, **extra}
    call, empty = client.list_objects_v2, 0
    position: dict[str, str] = {}
    while True:
        page, before = call(**request, **position), keys.count
        try:
            for key, known in entries(page):
                keys.check(key)
                yield key, known
        except KeyError as error:
            raise keys.error(f"lists an object without {error.args[0]}") from error
        except (ValueError, OverflowError) as error:
            raise keys.error(f"lists an object whose size or date cannot be read ({first_line(error)})") from error
        if page.keys() <= {"ResponseMetadata"}:
            raise keys.error("answers with something that is no listing")
        token = page.get("NextContinuationToken")
        if not page.get("IsTruncated", bool(token)):
            return
        empty = empty + 1 if keys.count == before else 0
        if empty and (not token or empty > MAX_EMPTY_PAGES):
            raise keys.error("has no end: pages without a key lead to others" if token else "ends in an empty page")
        if token:
            position = {"ContinuationToken": token}
        else:
            if call != client.list_objects:
                log.debug("s3: %s is listed with version 1 of the API: a page has no token", bucket)
            call, position = client.list_objects, {"Marker": keys.last}


def take_entries(client: Any) -> None:
    """Make a client put the entries of listings where ``entries`` finds them."""
    for name in ("ListObjectsV2", "ListObjects"):
        client.meta.events.register(f"before-parse.s3.{name}", _take)


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
        size = int(fields["Size"])
        if not 0 <= size < 1 << 63:
            raise ValueError(f"{size:,} bytes")
        yield key, Identity(size, _nanoseconds(fields["LastModified"]), fields["ETag"].strip('"'))


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
