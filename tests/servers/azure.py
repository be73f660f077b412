"""An emulator of Azure Blob Storage on 127.0.0.1: Azurite, Microsoft's own, which checks signatures and conditions."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import secrets
import shutil
import subprocess
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from tests.servers.jars import cache_directory
from tests.servers.processes import Daemon, ServerUnavailable, free_ports, new_directory
from tests.servers.upload import for_each_file

VERSION = "3.35.0"
PROGRAMS = {"npm": "npm", "node": "nodejs"}  # with the Debian packages that have them
_ACCOUNT = "pqcachetest"
_READY_WITHIN = 60.0  # seconds


@dataclass(frozen=True)
class Azure:
    """A running emulator with one account."""

    endpoint: str  # http://127.0.0.1:P/ACCOUNT
    key: str = field(repr=False)
    _daemon: Daemon = field(repr=False)

    @property
    def options(self) -> Mapping[str, str]:
        """The options of pqcache's az:// that lead here."""
        return {"account_name": _ACCOUNT, "account_key": self.key, "endpoint": self.endpoint}

    @property
    def connection_string(self) -> str:
        """The account, its key and where it is, as Azure's tools take them."""
        return f"AccountName={_ACCOUNT};AccountKey={self.key};BlobEndpoint={self.endpoint}"

    @property
    def sas_token(self) -> str:
        """A signature that allows everything on this account."""
        fields = {"sp": "rwdlac", "ss": "b", "srt": "sco", "st": "", "se": "2099-01-01T00:00:00Z", "sip": ""}
        fields |= {"spr": "https,http", "sv": "2020-12-06", "ses": ""}
        text = "".join(f"{value}\n" for value in (_ACCOUNT, *fields.values()))
        signed = hmac.new(b64decode(self.key), text.encode(), hashlib.sha256).digest()
        given = {name: value for name, value in fields.items() if value}
        return urlencode({**given, "sig": b64encode(signed).decode()})

    def create_container(self, name: str) -> None:
        """Make an empty container."""
        self._request("PUT", name, "restype=container&")

    def delete_container(self, name: str) -> None:
        """Remove a container and what is in it."""
        self._request("DELETE", name, "restype=container&")

    def put(self, path: str, data: bytes) -> None:
        """Write CONTAINER/PATH, replacing what is there."""
        self._request("PUT", path, "", data, {"x-ms-blob-type": "BlockBlob"})

    def delete(self, path: str) -> None:
        """Remove CONTAINER/PATH."""
        self._request("DELETE", path, "")

    def upload_tree(self, local_dir: Path, path: str) -> int:
        """Put all files below `local_dir` below CONTAINER/PATH; returns how many."""
        return for_each_file(local_dir, lambda file, name: self.put(f"{path}/{name}", file.read_bytes()))

    def close(self) -> None:
        """End it; what it stored is gone."""
        self._daemon.kill()

    def _request(
        self, method: str, path: str, query: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        server = urlsplit(self.endpoint)
        connection = http.client.HTTPConnection(server.netloc, timeout=30)
        with contextlib.closing(connection):
            url = f"{server.path}/{quote(path)}?{query}{self.sas_token}"
            connection.request(method, url, body, {"x-ms-version": "2020-12-06", **(headers or {})})
            answer = connection.getresponse()
            if answer.status >= 300:
                raise OSError(f"{method} {path}: {answer.status} {answer.read()[:300]!r}")


def start(directory: Path) -> Azure:
    """Start an emulator with its files in a new directory below `directory`; about 2 s.

    Call it from the main thread. Raises ServerUnavailable, saying what is missing or what it logged.
    """
    program = find_azurite()
    home = new_directory(directory, "azure-")
    port = free_ports(1)[0]
    key = b64encode(secrets.token_bytes(64)).decode()
    argv = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(home)]
    argv += ["--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    accounts = {"AZURITE_ACCOUNTS": f"{_ACCOUNT}:{key}"}
    daemon = Daemon("azurite", ["env", *(f"{name}={value}" for name, value in accounts.items()), *argv], home)
    daemon.start_and_wait(lambda: _answers(port), _READY_WITHIN)
    return Azure(endpoint=f"http://127.0.0.1:{port}/{_ACCOUNT}", key=key, _daemon=daemon)


def find_azurite() -> str:
    """The path of Azurite's program, on the PATH or where `install` puts it; ServerUnavailable where it is missing."""
    if shutil.which("node") is None:
        raise ServerUnavailable("node, which runs Azurite, is missing; run: python -m tests.servers.install")
    found = shutil.which("azurite-blob") or shutil.which("azurite-blob", path=str(_directory() / "node_modules/.bin"))
    if found is None:
        raise ServerUnavailable("Azurite is missing; run: python -m tests.servers.install")
    return found


def cached() -> bool:
    """Whether Azurite is there already."""
    try:
        find_azurite()
    except ServerUnavailable:
        return False
    return True


def install() -> None:
    """Fetch Azurite (about 190 MB) into the cache directory, in one step; ServerUnavailable where npm cannot."""
    npm, target = shutil.which("npm"), _directory()
    if npm is None:
        raise ServerUnavailable("Azurite cannot be fetched without npm")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetching-", dir=target.parent) as name:
        package = Path(name) / "azurite"
        argv = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(package), f"azurite@{VERSION}"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip()[-1500:]
            raise ServerUnavailable(f"Azurite could not be fetched; npm said:\n{why}")
        with contextlib.suppress(OSError):  # somebody else was faster
            package.rename(target)


def _directory() -> Path:
    return cache_directory() / f"azurite-{VERSION}"


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        return connection.getresponse().status > 0
