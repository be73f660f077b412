"""Connections of ``http.client`` to one server, which are kept for further requests."""

from __future__ import annotations

import http.client
import select
from collections.abc import Callable


class HttpConnections:
    """Connections that ``connect`` makes; any thread may take one, which is then its own until it is put back."""

    def __init__(self, connect: Callable[[], http.client.HTTPConnection]) -> None:
        self._connect = connect
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False

    def take(self) -> http.client.HTTPConnection:
        """Return an idle connection that the server has not closed, or a new one."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._connect()
            if connection.sock is not None and not _is_readable(connection.sock.fileno()):
                return connection
            connection.close()

    def put_back(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        """Keep a connection for the next request if the response was read to its end, else close both."""
        if response.isclosed() and not response.will_close:
            self._idle.append(connection)
        else:
            response.close()
            connection.close()
        if self._closed:  # meanwhile, while a thread that nobody waits for was reading
            self.close()

    def close(self) -> None:
        """Close the idle connections, and those in use when they are put back."""
        self._closed = True
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread closes them too
                return
            connection.close()


def _is_readable(descriptor: int) -> bool:
    """Return whether something has come that nobody asked for, as the end of the connection."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
