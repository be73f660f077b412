"""A source on HDFS over HTTP (WebHDFS or HttpFS), through fsspec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import requests
from fsspec.implementations.webhdfs import WebHDFS

from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable, UsageError, first_line
from pqcache.store.drivers.base import (
    FIRST_ANSWER_TIMEOUT,
    TIMEOUT,
    DirectoryLimit,
    Source,
    check_options,
    path_below,
    root_of,
)
from pqcache.store.drivers.network_errors import known_cause
from pqcache.store.drivers.webhdfs_http import NameNodeSession, origin_of, shown
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import redact, userinfo

OPTIONS = {
    "user": "user name, as in webhdfs://USER@HOST:PORT",
    "password": "password, for HttpFS behind basic authentication",
    "token": "delegation token",
    "kerberos": "true authenticates with the Kerberos ticket cache",
    "https": "true talks HTTPS",
}
_CHUNK = 1 << 20
_ERRORS = (OSError, ValueError, RuntimeError, KeyError)


class WebHdfsSource(Source):
    """A Source over fsspec's WebHDFS; see ``pqcache.store.drivers.base.Source``."""

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        check_options("webhdfs://", options, OPTIONS)
        parts = urlsplit(url.replace("?", "%3F").replace("#", "%23"))
        user, password = userinfo(url)
        self.url = redact(url).rstrip("/")
        self._host = parts.netloc.rpartition("@")[2]
        self._root = root_of(url)
        self._only = ""
        self._timeout = timeout
        if not parts.hostname:
            raise UsageError(self.url, "no host", "write webhdfs://HOST:PORT/PATH")
        user = options.get("user") or user
        password = options.get("password") or password
        try:
            self._fs = self._connect(parts.hostname, parts.port or 9870, user, password, options)
        except (ValueError, ImportError) as error:
            raise UsageError(self.url, str(error)) from error
        self._session = self._fs.session = NameNodeSession(self._fs.session, self._fs.url, timeout)

    @staticmethod
    def _connect(host: str, port: int, user: str, password: str, options: Mapping[str, str]) -> Any:
        return WebHDFS(
            host=host,
            port=port,
            user=user or None,
            password=password or None,
            token=options.get("token"),
            kerberos=options.get("kerberos", "").lower() == "true",
            use_https=options.get("https", "").lower() == "true",
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def list(self) -> Iterator[SourceFile]:
        name = self._root
        try:
            if self._only:
                yield SourceFile(self._only, self.stat(self._only))
                return
            with self._session.limited_to(min(FIRST_ANSWER_TIMEOUT, self._timeout)):
                info = self._fs.info(self._root)
            if info["type"] != "directory":
                self._root, _, self._only = self._root.rpartition("/")
                yield SourceFile(self._only, _identity(info), info.get("blockSize", 0))
                return
            pending, limit = [""], DirectoryLimit(self.url)
            while pending:
                directory = pending.pop()
                name = path_below(self._root, directory).rstrip("/") or "/"
                for item in self._fs.ls(name, detail=True):
                    # fsspec's own ``name`` has one '/' too many at times
                    path = f"{directory}/{item['pathSuffix']}" if directory else item["pathSuffix"]
                    if item["type"] == "directory":
                        pending.append(limit.enter(path))
                    else:
                        yield SourceFile(path, _identity(item), item.get("blockSize", 0))
        except _ERRORS as error:
            raise self._error(name, error) from error

    def stat(self, path: str) -> Identity:
        name = path_below(self._root, path)
        try:
            return _identity(self._fs.info(name))
        except _ERRORS as error:
            raise self._error(name, error) from error

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        name = path_below(self._root, path)
        if length <= 0:
            return
        try:
            answer = self._fs._call("OPEN", path=name, redirect=False, offset=offset, length=length)
            answer = self._session.follow(answer)  # fsspec would return an error's body as data
            with answer:
                answer.raise_for_status()
                if answer.headers.get("Content-Length", str(length)) != str(length):
                    raise SourceUnavailable(f"webhdfs://{self._host}{name}", "the server sent another range")
                for chunk in answer.iter_content(_CHUNK):
                    if length <= 0:
                        return
                    yield chunk[:length]
                    length -= len(chunk)
        except _ERRORS as error:
            raise self._error(name, error) from error

    def close(self) -> None:
        self._session.close()

    def _error(self, name: str, error: Exception) -> SourceError:
        show = f"webhdfs://{self._host}{unquote(name)}"
        text = first_line(error)
        if isinstance(error, SourceError):
            return error
        if (known := known_cause(show, error)) is not None:
            return known
        if isinstance(error, requests.HTTPError) and error.response is not None:
            status = error.response.status_code
            origin = origin_of(str(error.response.url))
            if status in (401, 403) and origin != self._session.origin:
                reason = f"access denied by {shown(origin)}, to which the NameNode redirects"
                return SourceDenied(show, reason, "a password goes to the NameNode alone, check the token (-o token=)")
            if status in (401, 403):
                return SourceDenied(show, "access denied", "check the user, its permissions and the ticket")
            if status == 404 and "/webhdfs/" in str(error.response.url) and "offset=" in str(error.response.url):
                return SourceNotFound(show, "no such file", "check the URL")
            if status == 404:
                return SourceError(show, "no WebHDFS here", "check that the port is the HTTP port")
            return SourceUnavailable(show, f"the server answers {status}", "try again later")
        if isinstance(error, requests.ReadTimeout):
            return SourceUnavailable(show, "no answer in time", "check the host, the port and the cluster's health")
        if isinstance(error, requests.ConnectionError | requests.Timeout):
            return SourceUnavailable(show, "cannot connect", "check the host, the HTTP port and the network")
        if isinstance(error, FileNotFoundError):
            return SourceNotFound(show, "no such file or directory", "check the URL")
        if isinstance(error, PermissionError):
            return SourceDenied(show, "permission denied", "check the user and the directory's permissions")
        return SourceUnavailable(show, text)


def _identity(info: Mapping[str, Any]) -> Identity:
    return Identity(int(info["size"]), int(info["modificationTime"]) * 1_000_000)
