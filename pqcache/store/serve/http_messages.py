"""The part of HTTP/1.1 that is served: GET and HEAD without a body, one range, and conditions on a version.

What is not a plain request of this kind is refused, and its connection is closed: nothing is skipped or repaired.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import responses
from typing import Any
from urllib.parse import unquote

MAX_HEAD = 64 << 10  # bytes of a request's line and headers: a path of MAX_PATH characters, percent-encoded, fits
_REQUEST_LINE = re.compile(r"([A-Z]{1,20}) (/[!-~]*) HTTP/1\.([01])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class RequestRefused(Exception):
    """A request is answered with an error of this status, and a reason."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers or {}


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """A request: ``target`` is as it was sent, ``segments`` its path, decoded; ``headers`` are by lower-case name."""

    method: str
    target: str
    segments: tuple[str, ...]
    headers: Mapping[str, str]
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Bytes of an open file."""

    descriptor: int
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    """An answer, whose body is ``body`` or a part of a file."""

    status: int
    body: bytes = b""
    file: FileRange | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Bytes of the body."""
        return len(self.body) if self.file is None else self.file.length

    def head(self, is_last: bool) -> bytes:
        """Return the status line and the headers."""
        lines = [f"HTTP/1.1 {self.status} {responses.get(self.status, '')}", f"Content-Length: {self.length}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines.append("Connection: close" if is_last else "Connection: keep-alive")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def json_answer(status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """Return an answer whose body is a JSON object."""
    body = json.dumps(value).encode() + b"\n"
    return HttpAnswer(status=status, body=body, headers={"Content-Type": "application/json", **(headers or {})})


def refusal(refused: RequestRefused) -> HttpAnswer:
    """Return the answer to a request that is refused."""
    return json_answer(refused.status, {"error": refused.reason}, refused.headers)


def parse_request(head: bytes) -> HttpRequest:
    """Return the request in ``head``, which ends before the empty line; raises RequestRefused."""
    line, *rest = head.decode("latin-1").split("\r\n")
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise RequestRefused(400, "not a request of HTTP/1.1")
    method, target, minor = match.groups()
    headers: dict[str, str] = {}
    for text in rest:
        header = _HEADER.fullmatch(text)
        if header is None or _CONTROL.search(text):
            raise RequestRefused(400, "a header is malformed")
        name = header[1].lower()
        if name in headers:
            raise RequestRefused(400, "a header is repeated")
        headers[name] = header[2]
    if method not in ("GET", "HEAD"):
        raise RequestRefused(405, "only reading is possible", {"Allow": "GET, HEAD"})
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise RequestRefused(400, "a request has no body here")
    if "host" not in headers:
        raise RequestRefused(400, "the header Host is missing")
    is_last = minor == "0" or "close" in headers.get("connection", "").lower()
    return HttpRequest(method=method, target=target, segments=_segments(target), headers=headers, is_last=is_last)


def _segments(target: str) -> tuple[str, ...]:
    if "?" in target or "#" in target:
        raise RequestRefused(400, "there are no queries here")
    try:
        return tuple(unquote(segment, errors="strict") for segment in target[1:].split("/"))
    except UnicodeDecodeError:
        raise RequestRefused(400, "the path is not UTF-8") from None


def parse_range(text: str, size: int) -> tuple[int, int]:
    """Return the first byte and the number of bytes that a Range header asks for of a file of ``size`` bytes."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise RequestRefused(400, "one range like bytes=0-99 is possible")
    first, last = int(match[1]), int(match[2] or size - 1)
    if first >= size or last < first:
        raise RequestRefused(416, "the file has no such bytes", {"Content-Range": f"bytes */{size}"})
    return first, min(last, size - 1) - first + 1
