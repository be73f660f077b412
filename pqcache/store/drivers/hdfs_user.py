"""The user that this process is on HDFS, for the client that takes it from the environment.

hdfs-native reads ``HADOOP_USER_NAME`` whenever it connects, also when it connects again. So all its clients that a
process has open at one time have to be one user.
"""

from __future__ import annotations

import os
import pwd
import threading
import weakref
from dataclasses import dataclass, field

from pqcache.errors import UsageError

_VARIABLE = "HADOOP_USER_NAME"


@dataclass(kw_only=True)
class _Clients:
    """The open clients of a process: how many, who they are, and what the environment said before the first."""

    count: int = 0
    user: str = ""
    url: str = ""
    before: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_open = _Clients()


def open_clients() -> int:
    """Return how many clients are open in this process."""
    return _open.count


def environment_user() -> str:
    """Return the user in the environment as it is without open clients; empty if there is none."""
    with _open.lock:
        return (_open.before if _open.count else os.environ.get(_VARIABLE)) or ""


def act_as(user: str, url: str, client: object) -> weakref.finalize[[_Clients], object]:
    """Make ``user`` the one that this process is on HDFS until the returned function is called, or ``client`` is freed.

    Empty is the user of the environment, else the login. While a client of another user is open, UsageError about
    ``url``.
    """
    with _open.lock:
        before = _open.before if _open.count else os.environ.get(_VARIABLE)
        wanted = user or before or _login()
        if _open.count and wanted != _open.user:
            raise UsageError(
                url,
                f"cannot be opened as {wanted} while {_open.url} is open as {_open.user}: "
                "hdfs-native has one user in a process",
                "use one user for both, webhdfs:// for one of them, or separate runs",
            )
        if not _open.count:
            _open.user, _open.url, _open.before = wanted, url, before
            if user:
                os.environ[_VARIABLE] = user
        _open.count += 1
    close = weakref.finalize(client, _close, _open)
    close.atexit = False
    return close


def _login() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # as in a container
        return str(os.geteuid())


def _close(clients: _Clients) -> None:
    with clients.lock:
        clients.count -= 1
        if clients.count:
            return
        if clients.before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = clients.before
