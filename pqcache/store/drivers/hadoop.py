"""Hadoop's configuration files, read as its own clients read them, and the user that this process is on HDFS."""

from __future__ import annotations

import os
import pwd
import re
import threading
import weakref
from dataclasses import dataclass, field
from xml.etree import ElementInclude, ElementTree

from pqcache.errors import UsageError

_VARIABLE = re.compile(r"\$\{([^${}\s]+)\}")


def site_configuration() -> dict[str, str]:
    """Return the properties in core-site.xml and hdfs-site.xml, with variables replaced; the last value counts.

    The files are in HADOOP_CONF_DIR, else in HADOOP_HOME/etc/hadoop; without either there are no properties.
    """
    return with_variables_replaced(site_files())


def site_files() -> dict[str, str]:
    """Properties in the site's files, with ``${variables}`` as written."""
    home = os.environ.get("HADOOP_HOME")
    directory = os.environ.get("HADOOP_CONF_DIR") or (os.path.join(home, "etc", "hadoop") if home else "")
    values: dict[str, str] = {}
    for name in ("core-site.xml", "hdfs-site.xml") if directory else ():
        values.update(read_xml(os.path.join(directory, name)))
    return values


def with_variables_replaced(values: dict[str, str]) -> dict[str, str]:
    """Replace ``${variables}`` by other properties, or by ``${env.NAME}``."""
    found = dict(values)

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        return os.environ.get(name[4:], "") if name.startswith("env.") else found.get(name, match[0])

    for name in found:
        for _ in range(20):  # as deep as Hadoop goes
            found[name] = _VARIABLE.sub(value_of, before := found[name])
            if found[name] == before:
                break
    return found


def read_xml(path: str, *, strict: bool = False, missing: str = "") -> dict[str, str]:
    """Return the properties in a Hadoop configuration file; a file that is not there has none.

    ``strict`` refuses what libhdfs3's own reader cannot parse. With ``missing``, a file that is not there raises
    UsageError with that as its advice. A file that cannot be read, or is none of Hadoop's, raises UsageError.
    """
    try:
        root = ElementTree.parse(path).getroot()
        if not strict:
            ElementInclude.include(root, base_url=path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if missing:
            raise UsageError(path, "no such file", missing) from error
        return {}
    except (OSError, SyntaxError, ValueError, LookupError) as error:
        raise UsageError(path, str(error), "it must be readable XML") from error
    if root.tag != "configuration" or (
        strict and any(item.tag != "property" or not item.findtext("name") for item in root)
    ):
        raise UsageError(path, "not a Hadoop configuration file: <configuration> with <property> in it")
    return {
        name: (item.findtext("value") or "").strip()
        for item in root.iter("property")
        if (name := (item.findtext("name") or "").strip())
    }


# hdfs-native reads this whenever it connects, also when it connects again. So all its clients that a process has open
# at one time have to be one user.
_USER_VARIABLE = "HADOOP_USER_NAME"


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
    return _open.count


def environment_user() -> str:
    """The user in the environment as it is without open clients."""
    with _open.lock:
        return (_open.before if _open.count else os.environ.get(_USER_VARIABLE)) or ""


def act_as(user: str, url: str, client: object) -> weakref.finalize[[_Clients], object]:
    """Make ``user`` the one that this process is on HDFS until the returned function is called, or ``client`` is freed.

    Empty is the user of the environment, else the login. While a client of another user is open, UsageError about
    ``url``.
    """
    with _open.lock:
        before = _open.before if _open.count else os.environ.get(_USER_VARIABLE)
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
                os.environ[_USER_VARIABLE] = user
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
            os.environ.pop(_USER_VARIABLE, None)
        else:
            os.environ[_USER_VARIABLE] = clients.before
