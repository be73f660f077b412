"""An emulator of Google Cloud Storage on 127.0.0.1: see gcs_emulator.py."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlsplit

from tests.servers.processes import Daemon, ServerUnavailable, free_ports, new_directory
from tests.servers.upload import for_each_file

_READY_WITHIN = 60.0  # seconds


@dataclass(frozen=True)
class Gcs:
    """A running emulator."""

    endpoint: str  # http://127.0.0.1:P
    token: str = field(repr=False)
    _daemon: Daemon = field(repr=False)

    @property
    def options(self) -> Mapping[str, str]:
        """The options of pqcache's gs:// that lead here."""
        return {"endpoint": self.endpoint, "token": self.token}

    def create_bucket(self, name: str) -> None:
        """Make an empty bucket."""
        self._request("POST", "/storage/v1/b", json.dumps({"name": name}).encode(), "application/json")

    def put(self, path: str, data: bytes) -> None:
        """Write BUCKET/PATH, replacing what is there."""
        bucket, _, name = path.partition("/")
        url = f"/upload/storage/v1/b/{bucket}/o?name={quote(name, safe='')}&uploadType="
        if data:
            self._request("POST", f"{url}media", data, "application/octet-stream")
        else:  # of which the emulator takes only this kind
            parts = ("Content-Type: application/json\r\n\r\n{}", "Content-Type: application/octet-stream\r\n\r\n")
            body = "".join(f"--END\r\n{part}\r\n" for part in parts) + "--END--\r\n"
            self._request("POST", f"{url}multipart", body.encode(), "multipart/related; boundary=END")

    def delete(self, path: str) -> None:
        """Remove BUCKET/PATH."""
        bucket, _, name = path.partition("/")
        self._request("DELETE", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}", b"", "")

    def upload_tree(self, local_dir: Path, path: str) -> int:
        """Put all files below `local_dir` below BUCKET/PATH; returns how many."""
        return for_each_file(local_dir, lambda file, name: self.put(f"{path}/{name}", file.read_bytes()))

    def close(self) -> None:
        """End it; what it stored is gone."""
        self._daemon.kill()

    def _request(self, method: str, url: str, body: bytes, kind: str) -> None:
        with contextlib.closing(http.client.HTTPConnection(urlsplit(self.endpoint).netloc, timeout=30)) as connection:
            connection.request(method, url, body, {"Content-Type": kind})
            answer = connection.getresponse()
            if answer.status >= 300:
                raise OSError(f"{method} {url}: {answer.status} {answer.read()[:300]!r}")


def start(directory: Path) -> Gcs:
    """Start an emulator that keeps all in memory, and logs into a new directory below `directory`.

    Call it from the main thread. Raises ServerUnavailable, saying what is missing or what it logged.
    """
    if find_spec("gcp_storage_emulator") is None:
        raise ServerUnavailable("the package gcp-storage-emulator is missing (extra dev)")
    home = new_directory(directory, "gcs-")
    port, token = free_ports(1)[0], secrets.token_hex(20)
    program = str(Path(__file__).with_name("gcs_emulator.py"))
    daemon = Daemon("gcs", [sys.executable, program, str(port), token, str(home)], home)
    daemon.start_and_wait(lambda: _answers(port), _READY_WITHIN)
    return Gcs(endpoint=f"http://127.0.0.1:{port}", token=token, _daemon=daemon)


def _answers(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
