"""A real S3 server on 127.0.0.1: a Ceph RADOS Gateway with one monitor and one object store in memory.

Ceph rather than a simulation, because it checks signatures, honours ranges and conditional requests, and
makes ETags as Amazon does.
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.servers.processes import (
    Daemon,
    find_program,
    free_ports,
    new_directory,
    run_tool,
    wait_until,
)
from tests.servers.upload import for_each_file

_READY_WITHIN = 60.0  # seconds
PROGRAMS = {  # with the Debian packages that have them
    "ceph-mon": "ceph-mon",
    "ceph-osd": "ceph-osd",
    "radosgw": "radosgw",
    "ceph": "ceph-common",
    "monmaptool": "ceph-common",
    "radosgw-admin": "ceph-common",
}


@dataclass(frozen=True)
class S3:
    """A running S3 server with one user, who may make buckets."""

    endpoint: str  # http://127.0.0.1:P
    access_key: str
    secret_key: str = field(repr=False)
    directory: Path
    _daemons: Mapping[str, Daemon] = field(repr=False)

    @property
    def env(self) -> Mapping[str, str]:
        """The AWS_* variables with which boto3 and the tools of Amazon talk to this server and no other."""
        return MappingProxyType(
            {
                "AWS_ENDPOINT_URL": self.endpoint,
                "AWS_ACCESS_KEY_ID": self.access_key,
                "AWS_SECRET_ACCESS_KEY": self.secret_key,
                "AWS_DEFAULT_REGION": "us-east-1",
                # Ceph 16 does not know the checksums that newer clients send on their own account.
                "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
                "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
                # Nothing from the user's own settings, and no looking for a role on the network.
                "AWS_CONFIG_FILE": "/dev/null",
                "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        )

    def client(self) -> Any:
        """A new boto3 client; close it when done with it."""
        import boto3  # here, so that the server can be run without it
        from botocore.config import Config

        settings = Config(
            max_pool_connections=32,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return boto3.session.Session(self.access_key, self.secret_key, region_name="us-east-1").client(
            "s3", endpoint_url=self.endpoint, config=settings
        )

    def upload_tree(self, local_dir: Path, url: str) -> int:
        """Put all files below `local_dir` below `url`, s3://BUCKET/PREFIX; returns how many.

        The bucket is made if it is not there. As with every use of boto3's upload_file, files from 8 MiB on
        are sent in parts, so that their ETag is not an MD5.
        """
        from boto3.s3.transfer import TransferConfig

        bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        one_thread_each = TransferConfig(use_threads=False)
        with contextlib.closing(self.client()) as client:
            client.create_bucket(Bucket=bucket)  # succeeds if it is ours already

            def put(file: Path, name: str) -> None:
                key = f"{prefix}/{name}" if prefix else name
                client.upload_file(str(file), bucket, key, Config=one_thread_each)

            return for_each_file(local_dir, put)

    def close(self) -> None:
        """End all three processes, and with them the data; harmless when done twice."""
        for daemon in reversed(list(self._daemons.values())):
            daemon.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def start(directory: Path, *, capacity: int = 4 << 30) -> S3:
    """Start an S3 server with its files in a new directory below `directory`; about 2 s.

    Call it from the main thread: the servers end with the thread that started them.
    `capacity` is in bytes. All data is in memory, where it takes about twice its size; when the capacity is
    used up, writes and deletes hang for a minute and fail.
    Raises ServerUnavailable, saying what is missing or what the server logged.
    """
    program = {name: find_program(name, package) for name, package in PROGRAMS.items()}
    home = new_directory(directory, "s3-")
    mon_port, port = free_ports(2)
    conf = home / "ceph.conf"
    fsid, osd_uuid = str(uuid.uuid4()), str(uuid.uuid4())
    conf.write_text(_configuration(home, fsid, mon_port, port, capacity))
    use_conf = ["--conf", str(conf)]
    daemons = {
        "mon": Daemon("mon", [program["ceph-mon"], *use_conf, "-f", "-i", "a"], home),
        "osd": Daemon("osd", [program["ceph-osd"], *use_conf, "-f", "-i", "0"], home),
        "rgw": Daemon("rgw", [program["radosgw"], *use_conf, "-f", "-n", "client.rgw"], home),
    }
    server = S3(
        endpoint=f"http://127.0.0.1:{port}",
        access_key="pqcache-test",
        secret_key=secrets.token_hex(20),
        directory=home,
        _daemons=daemons,
    )
    try:
        (home / "osd-data").mkdir()
        monmap = home / "monmap"
        address = f"[v2:127.0.0.1:{mon_port}]"
        run_tool([program["monmaptool"], "--create", "--fsid", fsid, "--addv", "a", address, monmap], home)
        run_tool([program["ceph-mon"], *use_conf, "--mkfs", "-i", "a", "--monmap", monmap], home)
        daemons["mon"].start()
        # The tools below wait for the daemons they need, so nothing has to be polled for in between.
        run_tool([program["ceph"], *use_conf, "osd", "new", osd_uuid, "0"], home)
        run_tool([program["ceph-osd"], *use_conf, "--mkfs", "-i", "0", "--osd-uuid", osd_uuid], home)
        daemons["osd"].start()
        user = ["--uid=test", "--display-name=test", "--max-buckets=10000"]
        user += ["--access-key", server.access_key, "--secret-key", server.secret_key]
        run_tool([program["radosgw-admin"], *use_conf, "-n", "client.rgw", "user", "create", *user], home)
        daemons["rgw"].start()
        wait_until(lambda: _answers(port), list(daemons.values()), _READY_WITHIN)
    except BaseException:
        server.close()
        raise
    return server


def _configuration(home: Path, fsid: str, mon_port: int, port: int, capacity: int) -> str:
    return f"""\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
ms bind msgr1 = false
# No keys between the daemons. The gateway's own clients still have to sign every request.
auth cluster required = none
auth service required = none
auth client required = none
# One copy of everything on one store, and nothing that would need a manager daemon.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
# Loopback does not flip bits.
ms crc data = false
ms crc header = false
# Errors only, to standard error, which goes to our logs.
log to file = false
log to stderr = false
err to stderr = true
mon cluster log to file = false
debug ms = 0/0
debug mon = 0/0
debug paxos = 0/0
debug osd = 0/0
debug rocksdb = 0/0
debug rgw = 0/0
# Files that would be written outside our directory; a socket's path must not be long, so there is none.
run dir = {home}
crash dir = {home}
admin socket =
pid file =
# Not to stop because the machine's own disk is nearly full.
mon data avail crit = 1
mon data avail warn = 1
mon osd full ratio = .98
mon osd backfillfull ratio = .975
mon osd nearfull ratio = .97
osd failsafe full ratio = .99

[mon]
mon data = {home}/mon-data
mon initial members = a
# Starting is a long row of small decisions of the monitor: take each one at once.
paxos propose interval = 0.05
paxos min wait = 0.01

[mon.a]
host = localhost

[osd]
osd data = {home}/osd-data
osd objectstore = memstore
memstore device bytes = {capacity}
osd op num shards = 2
osd op num threads per shard = 2
osd max scrubs = 0

[client.rgw]
# The default, secure, cannot be agreed on without keys: the gateway would hang.
ms mon client mode = crc
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw thread pool size = 64
rgw dynamic resharding = false
rgw override bucket index max shards = 1
rgw run sync thread = false
rgw enable lc threads = false
# Give back the memory of removed objects within seconds instead of hours.
rgw gc obj min wait = 1
rgw gc processor period = 2
"""


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/")
        response = connection.getresponse()
        response.read()
        return response.status == 200
    except http.client.HTTPException:
        return False
    finally:
        connection.close()
