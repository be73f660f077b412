"""gcp-storage-emulator with what it lacks of the XML API: python tests/servers/gcs_emulator.py PORT TOKEN HOME

The emulator stores objects and answers the JSON API, which the tests write with. Clients in Rust use the XML API, so
that is added here on the same storage: listings by pages, HEAD, ranges, If-Match; PUT, copies, uploads in parts and
DELETE. Of requests with a token, only those with TOKEN are allowed. HOME is not used: it is there to be seen in the
list of processes.
"""

from __future__ import annotations

import re
import secrets
import sys
import threading
from datetime import datetime
from email.utils import format_datetime
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers.objects import _checksums, _make_object_resource
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

_PAGE = 20
_JSON = ("/storage/", "/upload/", "/download/", "/batch/", "/b/")


class MemoryStorage(Storage):  # type: ignore[misc]
    def _write_config_to_file(self) -> None:
        """Leave out what the emulator does for each write: it writes down all objects."""


class Handler(RequestHandler):  # type: ignore[misc]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    lock = threading.Lock()
    token = ""
    uploads: ClassVar[dict[str, dict[int, bytes]]] = {}  # in parts that are not complete

    def do_GET(self) -> None:
        place = self._place()
        with self.lock:
            if place is None:
                super().do_GET()
            elif self._allowed():
                bucket, key, query = place
                self._list(bucket, query) if not key else self._object(bucket, key)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        place = self._place()
        with self.lock:
            if place is None:
                super().do_PUT()
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not self._allowed():
                return
            bucket, key, query = place
            if bucket not in self.storage.buckets:
                self._answer(404, _error("NoSuchBucket"))
            elif "uploadId" in query:
                self.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
                self._answer(200, b"", {"ETag": f'"{query["partNumber"][0]}"'})
            elif (source := self.headers.get("x-goog-copy-source")) is not None:
                self._copy(source, bucket, key)
            else:
                self._put(bucket, key, body)

    def do_POST(self) -> None:
        place = self._place()
        with self.lock:
            if place is None:
                super().do_POST()
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not self._allowed():
                return
            bucket, key, query = place
            if "uploads" in query:
                number = secrets.token_hex(8)
                self.uploads[number] = {}
                text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
                self._answer(200, text.encode())
                return
            parts = self.uploads.pop(query["uploadId"][0])
            listed = [int(part) for part in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
            assert listed == sorted(parts), (listed, sorted(parts))
            self._put(bucket, key, b"".join(parts[number] for number in listed), completes=True)

    def do_DELETE(self) -> None:
        place = self._place()
        with self.lock:
            if place is None:
                super().do_DELETE()
                return
            if not self._allowed():
                return
            bucket, key, query = place
            try:
                if "uploadId" in query:
                    del self.uploads[query["uploadId"][0]]
                else:
                    self.storage.delete_file(bucket, key)
            except (NotFound, KeyError):
                self._answer(404, _error("NoSuchKey"))
                return
            self._answer(204, b"")

    def _place(self) -> tuple[str, str, dict[str, list[str]]] | None:
        """Return the bucket, the object and the query of a request to the XML API; None for one to the JSON API."""
        parts: SplitResult = urlsplit(self.path)
        if parts.path == "/" or parts.path.startswith(_JSON):
            return None
        bucket, _, key = unquote(parts.path[1:]).partition("/")
        return bucket, key, parse_qs(parts.query, keep_blank_values=True)

    def _allowed(self) -> bool:
        given = self.headers.get("Authorization")
        if given in (None, f"Bearer {self.token}"):
            return True
        self._answer(401, _error("AuthenticationRequired"))
        return False

    def _copy(self, source: str, bucket: str, key: str) -> None:
        from_bucket, _, from_key = unquote(source.lstrip("/")).partition("/")
        try:
            data = self.storage.get_file(from_bucket, from_key)
        except NotFound:
            self._answer(404, _error("NoSuchKey"))
            return
        self._put(bucket, key, data)

    def _put(self, bucket: str, key: str, data: bytes, completes: bool = False) -> None:
        file = _make_object_resource("", bucket, key, "application/octet-stream", str(len(data)))
        self.storage.create_file(bucket, key, data, _checksums(data, file))
        etag = _etag(file)
        text = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
        headers = {"ETag": f'"{etag}"', "x-goog-generation": file["generation"]}
        self._answer(200, text.encode() if completes else b"", headers)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        try:
            files, _ = self.storage.get_file_list(bucket, prefix or None, None, None)
        except NotFound:
            self._answer(404, _error("NoSuchBucket"))
            return
        found = sorted((file for file in files if file["name"] > after), key=lambda file: str(file["name"]))
        page, rest = found[:_PAGE], found[_PAGE:]
        items = "".join(
            f"<Contents><Key>{escape(file['name'])}</Key><Generation>{file['generation']}</Generation>"
            f'<LastModified>{file["updated"]}</LastModified><ETag>"{_etag(file)}"</ETag><Size>{file["size"]}</Size>'
            "</Contents>"
            for file in page
        )
        token = f"<NextContinuationToken>{escape(page[-1]['name'])}</NextContinuationToken>" if rest else ""
        more = f"<IsTruncated>{str(bool(rest)).lower()}</IsTruncated>{token}"
        body = f"<ListBucketResult>{more}{items}</ListBucketResult>"
        self._answer(200, body.encode())

    def _object(self, bucket: str, key: str) -> None:
        try:
            data, file = self.storage.get_file(bucket, key), self.storage.get_file_obj(bucket, key)
        except NotFound:
            self._answer(404, _error("NoSuchKey"))
            return
        etag = f'"{_etag(file)}"'
        if self.headers.get("If-Match", etag) != etag:
            self._answer(412, _error("PreconditionFailed"))
            return
        moment = datetime.fromisoformat(file["updated"].replace("Z", "+00:00"))
        headers = {"ETag": etag, "Last-Modified": format_datetime(moment).replace("+0000", "GMT")}
        headers["x-goog-generation"] = file["generation"]
        status = 200
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1 if last else len(data), len(data))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
            data, status = data[int(first) : end], 206
        self._answer(status, data, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, Any] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(file: dict[str, Any]) -> str:
    """As Google's: another one for each generation."""
    return f"{file['etag'].rstrip('=')}-{file['generation']}"


def _error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # with socketserver's 5, of many connections at once some are reset


def main() -> None:
    port, Handler.token = int(sys.argv[1]), sys.argv[2]
    server = _Server(("127.0.0.1", port), partial(Handler, MemoryStorage(use_memory_fs=True)))
    server.serve_forever()


if __name__ == "__main__":
    main()
