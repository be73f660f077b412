"""The identity of a file from what fsspec's ``info`` or ``ls`` says of it, under the names that file systems use."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from pqcache.store.manifest import Identity

# the first that is there is the tag; each changes with the bytes of the file
_TAGS = (
    "generation", "etag", "ETag", "e_tag", "lfs", "xet_hash", "blob_id", "md5", "md5Hash", "content_md5", "Content-MD5",
    "checksum", "sha256", "sha", "content_hash", "version_id",
)  # fmt: skip
_TIMES = (
    "mtime", "modified", "last_modified", "LastModified", "Last-Modified", "modification_time", "modifiedTime",
    "updated", "last_write_time", "modify", "created",
)  # fmt: skip
_MILLISECONDS = 1e11  # a larger number of seconds would be a date after the year 5000


def identity_of(info: Mapping[str, Any]) -> Identity | None:
    """Return the identity in ``info``; None where it holds no size, or a size and nothing that changes with the bytes.

    Times have microseconds: file systems give them as floats.
    """
    size = info.get("size")
    tag = next((text for name in _TAGS if (text := _tag(info.get(name)))), "")
    moment = next((time for name in _TIMES if (time := _nanoseconds(info.get(name)))), 0)
    if not isinstance(size, int) or not (tag or moment):
        return None
    return Identity(size, moment, tag)


def _tag(value: Any) -> str:
    """Return the text of a tag; of what Hugging Face says of a large file, its checksum."""
    if isinstance(value, Mapping):
        value = value.get("sha256")
    elif hasattr(value, "sha256"):
        value = value.sha256
    return "" if value is None else str(value).strip('"')


def _nanoseconds(value: Any) -> int:
    """Return a time in nanoseconds since 1970; 0 for what is none."""
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0
    seconds = value / 1000 if value > _MILLISECONDS else value
    return round(seconds * 1e6) * 1000


def _parsed(text: str) -> Any:
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            return parse(text.replace("Z", "+00:00") if parse is datetime.fromisoformat else text)
        except ValueError:
            continue
    return None
