"""Fixtures for tests that need a server, and what a run of the tests is made of: groups, depth, profiles.

A server starts when the first test asks and stops at the end. Where it cannot run, its tests are skipped, loudly;
with PQCACHE_REQUIRE_SERVERS=1 they fail instead. With PQCACHE_TEST_PROFILE=deep, properties are tried with more
examples and are marked `deep`, as the long sweeps are.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import is_hypothesis_test, settings

from pqcache.store.drivers.hdfs import open_clients
from tests import short_waits
from tests.examples import PROFILE, examples
from tests.forked_commands import fork_checkers
from tests.servers import azure as azure_server
from tests.servers import gcs as gcs_server
from tests.servers import hdfs as hdfs_server
from tests.servers import hive as hive_server
from tests.servers import s3 as s3_server
from tests.servers.processes import ServerUnavailable
from tests.worker_pipes import keep_pipes_from_forks

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs
    from tests.servers.s3 import S3


# without credentials the clients of clouds would ask the network for the account of the machine
NOWHERE = "127.0.0.1:1"
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
os.environ.update(dict.fromkeys(("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"), NOWHERE))
os.environ.update(NO_GCE_CHECK="true", IDENTITY_ENDPOINT=f"http://{NOWHERE}/msi", IDENTITY_HEADER="none")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background would pass on that it is ignored

short_waits.install()
fork_checkers()

settings.register_profile("quick", deadline=None, max_examples=examples(100))
settings.register_profile("deep", deadline=None, max_examples=200)
settings.load_profile(PROFILE)

_SKIPPED_FOR_SERVER = "no test server: "
_DETAILS = pytest.StashKey[dict[str, str]]()  # what the servers logged, by the reason of the skips


@dataclass(frozen=True)
class Bucket:
    """A bucket of its own for one test, with a boto3 client."""

    name: str
    client: Any

    @property
    def url(self) -> str:
        return f"s3://{self.name}"


@pytest.fixture
def few_cores_are_fine() -> Iterator[None]:
    """A DataLoader may have more workers than there are cores, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


def _server(name: str, start: Callable[[Path], Any]) -> Any:
    """A fixture of a running server, shared by the session; where it cannot run, its tests are skipped, or fail."""

    @pytest.fixture(scope="session")
    def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        try:
            started = start(tmp_path_factory.getbasetemp())
        except ServerUnavailable as error:
            why = f"{_SKIPPED_FOR_SERVER}{name}: {error}"
        else:
            with closing(started):
                yield started
            return
        if os.environ.get("PQCACHE_REQUIRE_SERVERS", "0") not in ("", "0"):
            pytest.fail(why, pytrace=False)
        reason = why.splitlines()[0]
        request.config.stash.setdefault(_DETAILS, {})[reason] = why
        pytest.skip(reason)

    return server


hdfs = _server("HDFS", hdfs_server.start)  # a test that kills a part of it restarts it as well
s3 = _server("S3", s3_server.start)  # see s3_env for what makes clients use it
hive = _server("Hive metastore", hive_server.start)  # where each test has a database of its own
gcs = _server("GCS", gcs_server.start)
azure = _server("Azure", azure_server.start)


@pytest.fixture
def no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the user has set for Google's and Azure's clients, and proxies, out of a test."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_", "STORAGE_EMULATOR"))]:
        monkeypatch.delenv(name)
    _no_proxy(monkeypatch)


@pytest.fixture
def hdfs_dir(hdfs: Hdfs, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a new, empty directory on HDFS, removed after the test.

    Nothing of the user's own Hadoop is in the environment; `hdfs.env` has a HADOOP_CONF_DIR that works.
    """
    for name in [name for name in os.environ if name.startswith("HADOOP_")]:
        monkeypatch.delenv(name)
    _no_proxy(monkeypatch)
    url = f"{hdfs.url}/{_name(request)}"
    hdfs.mkdirs(url)
    yield url
    hdfs.delete(url)


@pytest.fixture(autouse=True)
def no_open_hdfs_client() -> Iterator[None]:
    """A test closes its sources on HDFS, since the user of the first open one is the user of the next test's too."""
    before = open_clients()
    yield
    if open_clients() > before:
        gc.collect()  # errors that tests have caught refer to sources
        assert open_clients() <= before, "a source on HDFS is open after the test"


@pytest.fixture
def s3_env(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """The AWS_* variables of the S3 server, put into the environment in place of the user's own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    _no_proxy(monkeypatch)
    return s3.env


@pytest.fixture
def s3_bucket(s3: S3, s3_env: Mapping[str, str], request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A new, empty bucket, with s3_env in the environment; emptied and removed after the test."""
    with closing(s3.client()) as client:
        bucket = Bucket(_name(request).lower().replace("_", "-"), client)
        client.create_bucket(Bucket=bucket.name)
        yield bucket
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name):
            if found := [{"Key": item["Key"]} for item in page.get("Contents", [])]:
                client.delete_objects(Bucket=bucket.name, Delete={"Objects": found, "Quiet": True})
        client.delete_bucket(Bucket=bucket.name)


def _name(request: pytest.FixtureRequest) -> str:
    """Unique, and telling which test it belongs to."""
    return re.sub(r"[^A-Za-z0-9]+", "_", request.node.name)[:40].strip("_") + "_" + uuid.uuid4().hex[:8]


def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep HTTP clients from asking the user's proxy for 127.0.0.1."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1", prepend=",")


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist see the end of a worker that has died, whatever processes its tests have forked."""
    if hasattr(config, "workerinput"):
        keep_pipes_from_forks()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses a server, and keep all that uses one on one worker, so that each server starts once a run.

    Servers that are large to download are for `make test-deep`. The slow tests come first: no worker is left with one
    of them when the others have ended.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        for server in ("hdfs", "s3", "hive", "gcs", "azure"):
            if server in getattr(item, "fixturenames", ()) and item.get_closest_marker(server) is None:
                item.add_marker(server)
            if item.get_closest_marker(server) is not None and item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(server))
        is_property = isinstance(item, pytest.Function) and is_hypothesis_test(item.function)
        if any(item.get_closest_marker(server) for server in ("hive", "azure")) or (is_property and PROFILE == "deep"):
            item.add_marker("deep")
        group = item.get_closest_marker("xdist_group")
        if group is not None and item.config.getoption("loadgroup", False):
            # as xdist 3.8 does, whose own attempt pytest 9.2 does not see: the scheduler reads the group from the id
            item._id = type(item._id).parse(f"{item.nodeid}@{group.args[0]}")  # type: ignore[attr-defined]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what the servers logged from a worker of xdist to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["servers"] = session.config.stash.get(_DETAILS, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker's servers logged."""
    node.config.stash.setdefault(_DETAILS, {}).update(getattr(node, "workeroutput", {}).get("servers", {}))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, None, None]:
    """Say at the very end, in red, how much was not tested for lack of a server, and why."""
    yield
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple) and _SKIPPED_FOR_SERVER in report.longrepr[2]
    )
    for reason, count in reasons.items():
        were = "test was" if count == 1 else "tests were"
        line = f"pqcache: {count} {were} SKIPPED because there is {reason}"
        terminalreporter.write_line(line, red=True, bold=True)
        for detail in config.stash.get(_DETAILS, {}).get(reason, "").splitlines()[1:]:
            terminalreporter.write_line(f"    {detail}")
