"""A real Hadoop 3.3.6 HDFS on 127.0.0.1: one NameNode, one DataNode, thrown away afterwards."""

from __future__ import annotations

import contextlib
import http.client
import os
import platform
import pwd
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote, urlencode, urlsplit
from xml.sax.saxutils import escape

from tests.servers import jars
from tests.servers.processes import (
    Daemon,
    find_program,
    free_ports,
    new_directory,
    run_tool,
    wait_until,
)
from tests.servers.upload import for_each_file

PROGRAMS = {"java": "default-jre-headless"}  # with the Debian packages that have them
_READY_WITHIN = 90.0  # seconds


@dataclass(frozen=True)
class Hdfs:
    """A running HDFS. Permissions are on: the user who runs it, and with him the tests, may do everything."""

    url: str  # hdfs://127.0.0.1:P
    webhdfs_url: str  # webhdfs://127.0.0.1:Q, for fsspec
    http_url: str  # http://127.0.0.1:Q
    datanode_http_url: str  # http://127.0.0.1:R, where WebHDFS sends its clients on to
    conf_dir: Path  # a HADOOP_CONF_DIR
    directory: Path
    _daemons: Mapping[str, Daemon] = field(repr=False)

    @property
    def env(self) -> Mapping[str, str]:
        """What to put into the environment of a Hadoop client."""
        return MappingProxyType({"HADOOP_CONF_DIR": str(self.conf_dir)})

    def close(self) -> None:
        """End both processes and remove everything they stored; harmless when done twice."""
        for daemon in self._daemons.values():
            daemon.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Stop "namenode" or "datanode" for a while: connections are accepted, nothing is ever answered."""
        self._daemons[name].send(signal.SIGSTOP)
        try:
            yield
        finally:
            self._daemons[name].send(signal.SIGCONT)

    # The eight below speak WebHDFS, and only while they run. A client of hdfs-native would do as well, but a
    # process that has built one cannot fork any more (the child hangs), and it needs half a second to close a file.

    def mkdirs(self, url: str) -> None:
        """Make a directory and its parents; `url` is a URL of this HDFS or an absolute path, as below."""
        _webhdfs(self.http_url, "PUT", _path(url), "MKDIRS")

    def delete(self, url: str) -> None:
        """Remove a file or a whole directory tree; nothing happens if it is not there."""
        _webhdfs(self.http_url, "DELETE", _path(url), "DELETE", recursive="true")

    def put(self, url: str, data: bytes | Path) -> None:
        """Write a file, bytes or a local file's, with its parent directories; one of that name is replaced."""
        _webhdfs(self.http_url, "PUT", _path(url), "CREATE", data, overwrite="true")

    def rename(self, url: str, to: str) -> None:
        """Rename a file or a directory to a name that is free."""
        if b"true" not in _webhdfs(self.http_url, "PUT", _path(url), "RENAME", destination=_path(to)):
            raise OSError(f"{url} cannot be renamed to {to}")

    def snapshot(self, url: str, name: str) -> None:
        """Make a snapshot of a directory, in its `.snapshot`."""
        _webhdfs(self.http_url, "PUT", _path(url), "ALLOWSNAPSHOT")
        _webhdfs(self.http_url, "PUT", _path(url), "CREATESNAPSHOT", snapshotname=name)

    def drop_snapshot(self, url: str, name: str) -> None:
        """Remove a snapshot: a directory that has some cannot be removed."""
        _webhdfs(self.http_url, "DELETE", _path(url), "DELETESNAPSHOT", snapshotname=name)

    def chmod(self, url: str, mode: int) -> None:
        """Set the permissions of a file or a directory, for users other than the one who runs the server."""
        _webhdfs(self.http_url, "PUT", _path(url), "SETPERMISSION", permission=f"{mode:o}")

    def upload_tree(self, local_dir: Path, url: str) -> int:
        """Put all files below `local_dir` below `url`, replacing what has the same name; returns how many."""
        target = url.rstrip("/")
        return for_each_file(local_dir, lambda file, name: self.put(f"{target}/{name}", file))

    def _wait(self) -> None:
        wait_until(lambda: _usable(self.http_url), list(self._daemons.values()), _READY_WITHIN)


def start(directory: Path, *, block_size: int = 134_217_728) -> Hdfs:
    """Start an HDFS that keeps everything in a new directory below `directory`; about 5 s.

    Call it from the main thread: the servers end with the thread that started them.
    `block_size` is in bytes, the default for new files; a multiple of 512.
    Raises ServerUnavailable, saying what is missing or what the server logged.
    """
    java = find_program("java", PROGRAMS["java"])
    libraries = jars.class_path()
    home = new_directory(directory, "hdfs-")
    rpc, http_port, *datanode_ports = free_ports(5)
    conf = _write_configuration(home, rpc, http_port, datanode_ports, block_size)
    command = _java_command(java, home, [conf, home / "resources", *libraries])
    namenode_class = "org.apache.hadoop.hdfs.server.namenode.NameNode"
    daemons = {
        "namenode": Daemon("namenode", [*command, namenode_class], home),
        "datanode": Daemon("datanode", [*command, "org.apache.hadoop.hdfs.server.datanode.DataNode"], home),
    }
    server = Hdfs(
        url=f"hdfs://127.0.0.1:{rpc}",
        webhdfs_url=f"webhdfs://127.0.0.1:{http_port}",
        http_url=f"http://127.0.0.1:{http_port}",
        datanode_http_url=f"http://127.0.0.1:{datanode_ports[1]}",
        conf_dir=conf,
        directory=home,
        _daemons=daemons,
    )
    try:
        daemons["datanode"].start()  # first: it keeps asking for the NameNode, so both start up side by side
        run_tool([*command, namenode_class, "-format", "-nonInteractive"], home)
        daemons["namenode"].start()
        server._wait()
    except BaseException:
        server.close()
        raise
    return server


def superuser() -> str:
    """The name of the user who starts the NameNode, which makes him HDFS's superuser."""
    return pwd.getpwuid(os.geteuid()).pw_name


def _write_configuration(home: Path, rpc: int, http_port: int, datanode: list[int], block_size: int) -> Path:
    conf = home / "conf"
    conf.mkdir()
    for name in ("hdfs", "datanode", "static"):  # looked for on the class path; empty will do: no web pages
        (home / "resources" / "webapps" / name).mkdir(parents=True)
    core = {
        "fs.defaultFS": f"hdfs://127.0.0.1:{rpc}",
        "hadoop.tmp.dir": home / "tmp",
        "hadoop.http.staticuser.user": superuser(),  # who WebHDFS takes a client for that does not say
        # The DataNode looks for the NameNode five times a second for a minute.
        "ipc.client.connect.retry.interval": 200,
        "ipc.client.connect.max.retries": 300,
    }
    hdfs = {
        "dfs.namenode.rpc-address": f"127.0.0.1:{rpc}",
        "dfs.namenode.http-address": f"127.0.0.1:{http_port}",
        "dfs.datanode.address": f"127.0.0.1:{datanode[0]}",
        "dfs.datanode.http.address": f"127.0.0.1:{datanode[1]}",
        "dfs.datanode.ipc.address": f"127.0.0.1:{datanode[2]}",
        "dfs.datanode.hostname": "127.0.0.1",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.namenode.name.dir": f"file://{home}/name",
        "dfs.datanode.data.dir": f"file://{home}/data",
        "dfs.replication": 1,
        "dfs.blocksize": block_size,
        "dfs.namenode.fs-limits.min-block-size": 512,  # files of many tiny blocks, for tests
        "dfs.permissions.enabled": "true",
        "dfs.namenode.safemode.extension": 0,
        "dfs.heartbeat.interval": 1,  # seconds; how soon the DataNode notices that the NameNode is back
        "dfs.namenode.edits.noeditlogchannelflush": "true",  # no fsync for data that is thrown away
        # A file is usually closed before its last block has been reported. WebHDFS then asks again after
        # 5 ms, not after 400 (hdfs-native has half a second built in, whatever is set here).
        "dfs.client.block.write.locateFollowingBlock.initial.delay.ms": 5,
        "dfs.client.block.write.locateFollowingBlock.retries": 12,
        "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",  # append, with one DataNode
    }
    for name, properties in (("core-site.xml", core), ("hdfs-site.xml", hdfs)):
        lines = [
            f"<property><name>{key}</name><value>{escape(str(value))}</value></property>"
            for key, value in properties.items()
        ]
        xml = "\n".join(['<?xml version="1.0"?>', "<configuration>", *lines, "</configuration>", ""])
        (conf / name).write_text(xml)
    (conf / "log4j.properties").write_text(
        "log4j.rootLogger=INFO,stderr\n"
        "log4j.appender.stderr=org.apache.log4j.ConsoleAppender\n"
        "log4j.appender.stderr.target=System.err\n"
        "log4j.appender.stderr.layout=org.apache.log4j.PatternLayout\n"
        "log4j.appender.stderr.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n\n"
    )
    (conf / "hosts").write_text(f"127.0.0.1 localhost\n127.0.0.1 {platform.node()}\n")
    return conf


def _java_command(java: str, home: Path, class_path: list[Path]) -> list[str]:
    return [
        java,
        "--add-opens=java.base/java.lang=ALL-UNNAMED",
        "-Xmx384m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",  # compiles fast rather than well: starts sooner
        "-XX:+IgnoreUnrecognizedVMOptions",
        "-XX:+UnlockDiagnosticVMOptions",
        "-XX:-BytecodeVerificationRemote",  # of classes, which takes a fifth of the start
        "-Djava.net.preferIPv4Stack=true",
        # Names are looked up in this file only: a NameNode does not start where the machine's own name
        # cannot be resolved, as in many containers.
        f"-Djdk.net.hosts.file={home}/conf/hosts",
        "-cp",
        ":".join(map(str, class_path)),
    ]


def _path(url: str) -> str:
    """The path of a URL as it is: HDFS has no queries and no fragments, `?` and `#` are parts of names."""
    return re.sub(r"^\w+://[^/]*", "", url) or "/"


def _usable(http_url: str) -> bool:
    """Whether a file can be written and read back, which needs both processes and a registered DataNode."""
    try:
        _webhdfs(http_url, "PUT", "/.ready", "CREATE", b"ready", overwrite="true")
        ready = _webhdfs(http_url, "GET", "/.ready", "OPEN") == b"ready"
        _webhdfs(http_url, "DELETE", "/.ready", "DELETE")
    except http.client.HTTPException:
        return False
    return ready


def _webhdfs(http_url: str, method: str, path: str, op: str, body: bytes | Path = b"", **options: str) -> bytes:
    """One WebHDFS request, with the redirection from the NameNode to the DataNode; OSError if refused.

    https://hadoop.apache.org/docs/r3.3.6/hadoop-project-dist/hadoop-hdfs/WebHDFS.html
    """
    query = urlencode({"op": op, "user.name": superuser(), **options})
    url = f"{http_url}/webhdfs/v1{quote(path)}?{query}"
    status, location, data = _request(method, url, b"")
    if status == 307:  # the NameNode's answer to what the DataNode has to do: there again, with the content
        status, _, data = _request(method, location, body)
    if status >= 300:
        raise OSError(f"{method} {url}: {status} {data[:500].decode(errors='replace')}")
    return data


def _request(method: str, url: str, body: bytes | Path) -> tuple[int, str, bytes]:
    """Status, Location header and content of the answer to an HTTP request."""
    target = urlsplit(url)
    assert target.hostname is not None
    size = body.stat().st_size if isinstance(body, Path) else len(body)
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
    with contextlib.ExitStack() as stack:
        content = stack.enter_context(body.open("rb")) if isinstance(body, Path) else body
        connection = http.client.HTTPConnection(target.hostname, target.port, timeout=60, blocksize=1 << 20)
        stack.callback(connection.close)
        connection.request(method, f"{target.path}?{target.query}", content, headers)
        response = connection.getresponse()
        return response.status, response.headers.get("Location", ""), response.read()
