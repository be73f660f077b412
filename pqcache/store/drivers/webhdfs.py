"""A source on HDFS over HTTP (WebHDFS or HttpFS), through fsspec.

A NameNode redirects a reader to a DataNode, with a delegation token or the user's name in the URL. So passwords,
tickets and cookies go only to the scheme, host and port named by the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import requests
from fsspec.implementations.webhdfs import WebHDFS
from requests.adapters import HTTPAdapter

from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable, UsageError, first_line
from pqcache.options import TIMEOUT
from pqcache.store.drivers.base import check_options, is_true, root_of
from pqcache.store.drivers.http_client import MAX_ANSWER, pool_classes
from pqcache.store.drivers.remote import RemoteSource
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import userinfo
from pqcache.units import printable

OPTIONS = {
    "user": "user name, as in webhdfs://USER@HOST:PORT",
    "password": "password, for HttpFS behind basic authentication",
    "token": "delegation token",
    "kerberos": "true authenticates with the Kerberos ticket cache",
    "https": "true talks HTTPS",
}
_MAX_REDIRECTS = 5
_CHUNK = 1 << 20
_DEFAULT_PORTS = {"http": 80, "https": 443}


class NameNodeSession:
    """Replaces the requests.Session in fsspec's client.

    Attributes:
        origin: the NameNode's scheme, host and port, as returned by ``origin_of``.
    """

    def __init__(self, session: requests.Session, url: str, timeout: float) -> None:
        self.origin = origin_of(url)
        self._timeout = timeout
        self._trusted, self._anonymous = session, requests.Session()
        self._anonymous.auth = lambda request: request  # nothing from ~/.netrc either
        self._anonymous.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self._anonymous.verify, self._anonymous.cert = session.verify, session.cert
        for each in (self._trusted, self._anonymous):
            each.get_redirect_target = lambda resp: None  # type: ignore[method-assign]  # they are followed here
            for scheme in ("http://", "https://"):
                each.mount(scheme, _Adapter(timeout))

    def request(
        self,
        method: str,
        url: str,
        params: Mapping[str, Any] | None = None,
        data: Any = None,
        allow_redirects: bool = True,
    ) -> requests.Response:
        """Read the response's body; without ``allow_redirects``, return the first response unread."""
        answer = self._send(method, url, params=params, data=data)
        return _with_body(self.follow(answer)) if allow_redirects else answer

    def follow(self, answer: requests.Response) -> requests.Response:
        """Follow redirects; the body is not read yet."""
        for _ in range(_MAX_REDIRECTS):
            if not answer.is_redirect:
                return answer
            answer.close()
            answer = self._send("GET", redirect_target(answer.url, answer.headers["Location"]))
        answer.close()
        raise SourceError(shown(self.origin), f"redirects {_MAX_REDIRECTS} times", "check the server")

    def close(self) -> None:
        self._trusted.close()
        self._anonymous.close()

    @contextmanager
    def limited_to(self, seconds: float) -> Iterator[None]:
        """Limit the wait for responses inside the block."""
        before, self._timeout = self._timeout, seconds
        try:
            yield
        finally:
            self._timeout = before

    def _send(self, method: str, url: str, **given: Any) -> requests.Response:
        session = self._trusted if origin_of(url) == self.origin else self._anonymous
        timeout = (5, self._timeout)
        return session.request(method, url, allow_redirects=False, stream=True, timeout=timeout, **given)


class _Adapter(HTTPAdapter):
    """Enforces the minimum speed, also through a proxy."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        super().__init__()

    def init_poolmanager(self, *args: Any, **given: Any) -> None:
        super().init_poolmanager(*args, **given)
        self.poolmanager.pool_classes_by_scheme = pool_classes(self.poolmanager.pool_classes_by_scheme, self._seconds)

    def proxy_manager_for(self, proxy: str, **given: Any) -> Any:
        known = proxy in self.proxy_manager
        manager = super().proxy_manager_for(proxy, **given)
        if not known:
            manager.pool_classes_by_scheme = pool_classes(manager.pool_classes_by_scheme, self._seconds)
        return manager


def origin_of(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def shown(origin: tuple[str, str, int]) -> str:
    scheme, host, port = origin
    return printable(f"{scheme}://{host}:{port}")


def redirect_target(url: str, location: str) -> str:
    """SourceError if a redirect leaves HTTP, or goes from https:// to http://."""
    source = shown(origin_of(url))
    try:
        target = urljoin(url, location)
        parts: SplitResult | None = urlsplit(target)
        origin_of(target)
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        scheme = printable(location.partition(":")[0])[:40]
        raise SourceError(
            source, f"redirects to a URL that is not http:// or https:// ({scheme}:...)", "check the server"
        )
    if parts.scheme == "http" and urlsplit(url).scheme == "https":
        raise SourceError(
            source,
            f"redirects from https:// to {shown(origin_of(target))}, where the token in the URL and the data would not "
            "be encrypted",
            "give the DataNodes HTTPS (dfs.http.policy=HTTPS_ONLY), or read without -o https=true",
        )
    return target


def _with_body(answer: requests.Response) -> requests.Response:
    """Read a response into memory; SourceError if it is cut off."""
    with answer:
        body = bytearray()
        for chunk in answer.iter_content(_CHUNK):
            body += chunk
            if len(body) > MAX_ANSWER:
                place = printable(urlsplit(str(answer.url)).path)
                reason = f"the answer about {place} has more than {MAX_ANSWER:,} bytes"
                raise SourceError(shown(origin_of(str(answer.url))), reason, "check the server")
        answer._content = bytes(body)
    return answer


class WebHdfsSource(RemoteSource):
    has_time_limit = True
    raises = (OSError, ValueError, RuntimeError, KeyError)

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        check_options("webhdfs://", options, OPTIONS)
        super().__init__(url, root_of(url), options, timeout)
        parts = urlsplit(url.replace("?", "%3F").replace("#", "%23"))
        user, password = userinfo(url)
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
            kerberos=is_true(options, "kerberos"),
            use_https=is_true(options, "https"),
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def _list(self) -> Iterator[SourceFile]:
        with self._session.limited_to(self.first_timeout):
            info = self._fs.info(self._root)
        if info["type"] == "directory":
            yield from self.walk(self._entries)
        else:
            yield SourceFile(self.take_only_file(), _identity(info), info.get("blockSize", 0))

    def _entries(self, directory: str) -> Iterator[tuple[str, SourceFile | None]]:
        for item in self._fs.ls(self.key_of(directory), detail=True):
            # fsspec's own ``name`` has one '/' too many at times
            path = f"{directory}/{item['pathSuffix']}" if directory else item["pathSuffix"]
            is_directory = item["type"] == "directory"
            yield path, None if is_directory else SourceFile(path, _identity(item), item.get("blockSize", 0))

    def _stat(self, path: str) -> Identity:
        return _identity(self._fs.info(self.key_of(path)))

    def _read(self, path: str, offset: int, length: int, tag: str) -> Iterator[bytes]:
        answer = self._fs._call("OPEN", path=self.key_of(path), redirect=False, offset=offset, length=length)
        answer = self._session.follow(answer)  # fsspec would return an error's body as data
        with answer:
            answer.raise_for_status()
            if answer.headers.get("Content-Length", str(length)) != str(length):
                raise SourceUnavailable(self.name_of(path), "the server sent another range")
            for chunk in answer.iter_content(_CHUNK):
                if length <= 0:
                    return
                yield chunk[:length]
                length -= len(chunk)

    def close(self) -> None:
        self._session.close()

    def explain(self, name: str, error: BaseException) -> SourceError:
        if isinstance(error, requests.HTTPError) and error.response is not None:
            status = error.response.status_code
            origin = origin_of(str(error.response.url))
            if status in (401, 403) and origin != self._session.origin:
                reason = f"access denied by {shown(origin)}, to which the NameNode redirects"
                return SourceDenied(name, reason, "a password goes to the NameNode alone, check the token (-o token=)")
            if status in (401, 403):
                return SourceDenied(name, "access denied", "check the user, its permissions and the ticket")
            if status == 404 and "/webhdfs/" in str(error.response.url) and "offset=" in str(error.response.url):
                return SourceNotFound(name, "no such file", "check the URL")
            if status == 404:
                return SourceError(name, "no WebHDFS here", "check that the port is the HTTP port")
            return SourceUnavailable(name, f"the server answers {status}", "try again later")
        if isinstance(error, requests.ReadTimeout):
            return SourceUnavailable(name, "no answer in time", "check the host, the port and the cluster's health")
        if isinstance(error, requests.ConnectionError | requests.Timeout):
            return SourceUnavailable(name, "cannot connect", "check the host, the HTTP port and the network")
        if isinstance(error, FileNotFoundError):
            return SourceNotFound(name, "no such file or directory", "check the URL")
        if isinstance(error, PermissionError):
            return SourceDenied(name, "permission denied", "check the user and the directory's permissions")
        return SourceUnavailable(name, first_line(error))


def _identity(info: Mapping[str, Any]) -> Identity:
    return Identity(int(info["size"]), int(info["modificationTime"]) * 1_000_000)
