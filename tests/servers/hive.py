"""A real Hive metastore 2.3.10 on this machine, with its database in memory, thrown away afterwards."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers import hive_jars
from tests.servers.processes import Daemon, find_program, free_ports, new_directory

_READY_WITHIN = 90.0  # seconds
_OPENED = ("java.lang", "java.util", "java.util.concurrent", "java.net")  # to Hive, which is older than Java's modules


@dataclass(frozen=True)
class Hive:
    """A running metastore."""

    port: int
    directory: Path
    _daemon: Daemon = field(repr=False)

    @property
    def url(self) -> str:
        """hive://127.0.0.1:P, without a table."""
        return f"hive://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End it and remove what it stored; harmless when done twice."""
        self._daemon.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def start(directory: Path) -> Hive:
    """Start a metastore with its files in a new directory below `directory`; about 4 s.

    Call it from the main thread: the server ends with the thread that started it. It listens on all addresses of this
    machine, since Hive 2 has no setting for that. Raises ServerUnavailable, saying what is missing or what it logged.
    """
    java = find_program("java", "default-jre-headless")
    libraries = hive_jars.class_path()
    home = new_directory(directory, "hive-")
    (port,) = free_ports(1)
    (home / "hive-site.xml").write_text(_configuration(home))
    (home / "log4j2.properties").write_text(_LOG)
    (home / "hive-log4j2.properties").write_text(_LOG)
    command = [java, "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
    command += [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED]
    command += ["-Djava.net.preferIPv4Stack=true", f"-Dderby.stream.error.file={home / 'derby.log'}"]
    # Hive asks for a logger of its own kind, whose library is not there.
    command += ["-Dlog4j2.contextSelector=org.apache.logging.log4j.core.selector.ClassLoaderContextSelector"]
    command += ["-cp", os.pathsep.join(map(str, [home, *libraries]))]
    command += ["org.apache.hadoop.hive.metastore.HiveMetaStore", "-p", str(port)]
    daemon = Daemon("metastore", command, home)
    daemon.start_and_wait(lambda: _answers(port), _READY_WITHIN)
    return Hive(port=port, directory=home, _daemon=daemon)


def _answers(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True


def _configuration(home: Path) -> str:
    values = {
        "javax.jdo.option.ConnectionURL": "jdbc:derby:memory:metastore;create=true",
        "javax.jdo.option.ConnectionDriverName": "org.apache.derby.jdbc.EmbeddedDriver",
        "datanucleus.schema.autoCreateAll": "true",
        "datanucleus.connectionPoolingType": "DBCP",
        "hive.metastore.schema.verification": "false",
        "hive.metastore.warehouse.dir": f"file://{home}/warehouse",
        "hive.in.test": "true",
    }
    items = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>\n" for name, value in values.items()
    )
    return f"<configuration>\n{items}</configuration>\n"


_LOG = """\
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c{1}: %m%n
"""
