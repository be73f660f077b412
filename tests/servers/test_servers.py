"""The test servers are real: what they store can be read back, and what must be refused is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import ROOT
from tests.servers.processes import Daemon

if TYPE_CHECKING:
    from tests.conftest import Bucket
    from tests.servers.hdfs import Hdfs
    from tests.servers.s3 import S3

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with a few files, one in a partition directory, one with a name that needs quoting."""
    for name in ("a.bin", "dt=2026-11-19/b c%.bin", "dt=2026-11-19/hour=01/ü.bin"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 1000)
    return tmp_path / "tree"


def names(tree: Path) -> list[str]:
    return sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())


@pytest.mark.hdfs
def test_hdfs_native_reads_back_what_it_wrote(hdfs_dir: str) -> None:
    # In a process of its own: this one could not fork any more once it has built a client.
    code = (
        "import sys, hdfs_native\n"
        "url, size = sys.argv[1], int(sys.argv[2])\n"
        "content = (bytes(range(256)) * size)[:size]\n"
        "client = hdfs_native.Client(url)\n"
        "path = '/' + url.split('/', 3)[3] + '/file'\n"
        "with client.create(path) as f: f.write(content)\n"
        "with client.read(path) as f: assert f.read() == content\n"
        "assert client.get_file_info(path).length == size\n"
    )
    subprocess.run([sys.executable, "-c", code, hdfs_dir, str(1 << 20)], check=True, timeout=60)


@pytest.mark.hdfs
def test_one_worker_runs_all_tests_of_a_server(request: pytest.FixtureRequest) -> None:
    """The scheduler of xdist reads the group from the end of the id; without it each worker starts a server."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@hdfs")


@pytest.mark.hdfs
def test_webhdfs_reads_back_what_it_wrote(hdfs: Hdfs, hdfs_dir: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    url = hdfs_dir.replace(hdfs.url, hdfs.webhdfs_url) + "/file"
    fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    with closing(fs.session):
        fs.pipe_file(path, CONTENT)
        assert fs.cat_file(path) == CONTENT
        assert fs.cat_file(path, start=1000, end=1300) == CONTENT[1000:1300]
        assert fs.info(path)["size"] == len(CONTENT)


@pytest.mark.hdfs
def test_upload_tree_to_hdfs(hdfs: Hdfs, hdfs_dir: str, tree: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    assert hdfs.upload_tree(tree, hdfs_dir) == 3
    fs, path = fsspec.core.url_to_fs(hdfs_dir.replace(hdfs.url, hdfs.webhdfs_url), skip_instance_cache=True)
    with closing(fs.session):
        found = {name.removeprefix(f"{path}/"): fs.cat_file(name) for name in fs.find(path)}
    assert found == {name: (tree / name).read_bytes() for name in names(tree)}


@pytest.mark.hdfs
@pytest.mark.deep
def test_namenode_and_datanode_come_back(hdfs: Hdfs, hdfs_dir: str, tree: Path) -> None:
    hdfs.upload_tree(tree, hdfs_dir)
    hdfs.kill_namenode()
    try:
        assert hdfs.pids["namenode"] == 0
        with pytest.raises(ConnectionRefusedError):
            hdfs.mkdirs(hdfs_dir)
    finally:
        hdfs.restart_namenode()
    hdfs.kill_datanode()
    hdfs.restart_datanode()
    url = f"{hdfs.http_url}/webhdfs/v1/{hdfs_dir.split('/', 3)[3]}/a.bin?op=OPEN"
    with urllib.request.urlopen(url, timeout=30) as response:
        assert response.read() == (tree / "a.bin").read_bytes()


@pytest.mark.hdfs
def test_a_paused_datanode_does_not_answer(hdfs: Hdfs, hdfs_dir: str, tree: Path) -> None:
    hdfs.upload_tree(tree, hdfs_dir)
    url = f"{hdfs.http_url}/webhdfs/v1/{hdfs_dir.split('/', 3)[3]}/a.bin?op=OPEN"
    with hdfs.paused("datanode"), pytest.raises(TimeoutError):
        urllib.request.urlopen(url, timeout=0.5)
    with urllib.request.urlopen(url, timeout=30) as response:
        assert response.read() == (tree / "a.bin").read_bytes()


@pytest.mark.s3
def test_s3_gives_back_what_was_put(s3_bucket: Bucket) -> None:
    put = s3_bucket.client.put_object(Bucket=s3_bucket.name, Key="dt=1/file", Body=CONTENT)
    with closing(s3_bucket.client.get_object(Bucket=s3_bucket.name, Key="dt=1/file")["Body"]) as body:
        assert body.read() == CONTENT
    head = s3_bucket.client.head_object(Bucket=s3_bucket.name, Key="dt=1/file")
    assert (head["ContentLength"], head["ETag"]) == (len(CONTENT), put["ETag"])


@pytest.mark.s3
def test_s3_answers_a_range_with_that_range(s3_bucket: Bucket) -> None:
    s3_bucket.client.put_object(Bucket=s3_bucket.name, Key="file", Body=CONTENT)
    got = s3_bucket.client.get_object(Bucket=s3_bucket.name, Key="file", Range="bytes=1000-1299")
    with closing(got["Body"]) as body:
        assert body.read() == CONTENT[1000:1300]
    assert got["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert got["ContentRange"] == f"bytes 1000-1299/{len(CONTENT)}"


@pytest.mark.s3
def test_s3_answers_if_match(s3_bucket: Bucket) -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    etag = s3_bucket.client.put_object(Bucket=s3_bucket.name, Key="file", Body=b"one")["ETag"]
    s3_bucket.client.put_object(Bucket=s3_bucket.name, Key="file", Body=b"two")
    with pytest.raises(exceptions.ClientError) as refused:
        s3_bucket.client.get_object(Bucket=s3_bucket.name, Key="file", IfMatch=etag)
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412


@pytest.mark.s3
def test_s3_rejects_a_wrong_secret_and_no_secret(s3: S3, s3_bucket: Bucket) -> None:
    boto3 = pytest.importorskip("boto3")
    exceptions = pytest.importorskip("botocore.exceptions")
    s3_bucket.client.put_object(Bucket=s3_bucket.name, Key="file", Body=b"one")
    session = boto3.session.Session(s3.access_key, "0" * 40)
    with closing(session.client("s3")) as client, pytest.raises(exceptions.ClientError) as refused:
        client.get_object(Bucket=s3_bucket.name, Key="file")
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    with pytest.raises(urllib.error.HTTPError) as anonymous:
        urllib.request.urlopen(f"{s3.endpoint}/{s3_bucket.name}/file", timeout=30)
    with closing(anonymous.value):
        assert anonymous.value.code == 403


@pytest.mark.s3
def test_s3_environment_is_enough_for_boto3(s3_bucket: Bucket) -> None:
    boto3 = pytest.importorskip("boto3")
    with closing(boto3.session.Session().client("s3")) as client:
        assert s3_bucket.name in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]


@pytest.mark.s3
def test_upload_tree_to_s3(s3: S3, s3_bucket: Bucket, tree: Path) -> None:
    assert s3.upload_tree(tree, f"{s3_bucket.url}/some/prefix") == 3
    listed = s3_bucket.client.list_objects_v2(Bucket=s3_bucket.name)["Contents"]
    assert sorted(item["Key"] for item in listed) == [f"some/prefix/{name}" for name in names(tree)]


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is missing")
def test_a_daemon_dies_with_a_parent_killed_hard(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.servers.processes import Daemon\n"
        "directory = Path(sys.argv[1]); script = directory / 'idle.py'\n"
        "script.write_text('import time; time.sleep(60)')\n"
        "daemon = Daemon('idle', [sys.executable, str(script)], directory)\n"
        "daemon.start(); print(daemon.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _runs(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(pid)


def test_no_signal_goes_to_a_process_that_was_not_started_here(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        daemon = Daemon("idle", [], tmp_path)
        daemon._process = stranger  # as if the process id had been taken over
        daemon.send(signal.SIGKILL)
        time.sleep(0.1)
        assert stranger.poll() is None
        stranger.kill()


def _runs(pid: int) -> bool:
    """Whether the process is there; one that has ended but was not waited for yet is not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
