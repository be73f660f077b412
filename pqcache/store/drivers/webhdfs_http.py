"""Sends the requests of WebHDFS, and follows its redirects without giving away what belongs to the NameNode.

A NameNode sends a reader on to a DataNode. What the DataNode has to know is in that URL, which the NameNode has made: a
delegation token, or the user's name. So passwords, tickets and cookies go to the scheme, host and port that the user
has named, and to no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter

from pqcache.errors import SourceError
from pqcache.store.drivers.http_speed_floor import MAX_ANSWER, pool_classes
from pqcache.store.urls import printable

_MAX_REDIRECTS = 5
_CHUNK = 1 << 20
_DEFAULT_PORTS = {"http": 80, "https": 443}


class NameNodeSession:
    """Takes the place of the requests.Session in fsspec's client.

    Attributes:
        origin: the NameNode's scheme, host and port, as ``origin_of`` gives them.
    """

    def __init__(self, session: requests.Session, url: str, timeout: float) -> None:
        self.origin = origin_of(url)
        self._timeout = timeout
        self._trusted, self._anonymous = session, requests.Session()
        self._anonymous.auth = lambda request: request  # nor what ~/.netrc has for the host
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
        """Return the answer to a request, its body read; without ``allow_redirects`` the first answer, not read yet."""
        answer = self._send(method, url, params=params, data=data)
        return _with_body(self.follow(answer)) if allow_redirects else answer

    def follow(self, answer: requests.Response) -> requests.Response:
        """Return the answer at the place that redirects lead to; its body is not read yet."""
        for _ in range(_MAX_REDIRECTS):
            if not answer.is_redirect:
                return answer
            answer.close()
            answer = self._send("GET", redirect_target(answer.url, answer.headers["Location"]))
        answer.close()
        raise SourceError(shown(self.origin), f"redirects {_MAX_REDIRECTS} times", "check the server")

    def close(self) -> None:
        """Close all connections."""
        self._trusted.close()
        self._anonymous.close()

    @contextmanager
    def limited_to(self, seconds: float) -> Iterator[None]:
        """Wait no longer than ``seconds`` for an answer inside the block."""
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
    """Connections whose answers have a floor of speed, also through a proxy."""

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
    """Return the scheme, host and port of a URL."""
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def shown(origin: tuple[str, str, int]) -> str:
    """Return an origin as it is shown."""
    scheme, host, port = origin
    return printable(f"{scheme}://{host}:{port}")


def redirect_target(url: str, location: str) -> str:
    """Return where a redirect of ``url`` leads; SourceError where it leaves HTTP, or goes from https:// to http://."""
    source = shown(origin_of(url))
    try:
        target = urljoin(url, location)
        parts: SplitResult | None = urlsplit(target)
        origin_of(target)
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        scheme = printable(location.partition(":")[0])[:40]
        raise SourceError(source, f"redirects to what is not http:// or https:// ({scheme}:...)", "check the server")
    if parts.scheme == "http" and urlsplit(url).scheme == "https":
        raise SourceError(
            source,
            f"redirects from https:// to {shown(origin_of(target))}, where the token in the URL and the data would not "
            "be encrypted",
            "give the DataNodes HTTPS (dfs.http.policy=HTTPS_ONLY), or read without -o https=true",
        )
    return target


def _with_body(answer: requests.Response) -> requests.Response:
    """Return an answer with its body in memory; SourceError where it does not end."""
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
