"""Sync against what people would use instead, on the same real servers, in one run.

    python benchmarks/sync.py [--rounds 5] [--small]

Everything is measured as a process of its own, interleaved round by round; the table shows medians, ratios
against pqcache, CPU seconds of the client per GB, and peak memory. Peers that are not on this machine are left
out and named. The servers are a Ceph RADOS Gateway, a Hadoop NameNode and DataNode, Azurite, and an emulator of Google
Cloud Storage, on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.servers import azure as azure_server  # noqa: E402
from tests.servers import gcs as gcs_server  # noqa: E402
from tests.servers import hdfs as hdfs_server  # noqa: E402
from tests.servers import s3 as s3_server  # noqa: E402

_PARTS = ["bulk", "small", "hdfs", "nothing", "delta", "gs", "az"]
PQCACHE = [sys.executable, "-m", "pqcache"]
_TRANSFER_MANAGER = """
import sys, os, boto3
from concurrent.futures import ThreadPoolExecutor
bucket, prefix, target = sys.argv[1:]
s3 = boto3.client("s3")
pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
keys = [o["Key"] for page in pages for o in page["Contents"]]
def get(key):
    path = os.path.join(target, key); os.makedirs(os.path.dirname(path), exist_ok=True)
    s3.download_file(bucket, key, path)
with ThreadPoolExecutor(4) as pool: list(pool.map(get, keys))
"""
_COPY_FILES = """
import sys, os, pyarrow.fs as fs
bucket, prefix, target = sys.argv[1:]
s3 = fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"].split("://")[1], scheme="http")
fs.copy_files(f"{bucket}/{prefix}", target, source_filesystem=s3, destination_filesystem=fs.LocalFileSystem())
"""
_HDFS_READ = """
import sys, os, hdfs_native
url, root, target = sys.argv[1:]
client = hdfs_native.Client(url)
for status in client.list_status(root, recursive=True):
    if status.isdir: continue
    path = target + status.path; os.makedirs(os.path.dirname(path), exist_ok=True)
    with client.read(status.path) as source, open(path, "wb") as out:
        for chunk in source.read_range_stream(0, len(source)): out.write(chunk)
"""
_FSSPEC_GET = """
import sys, json, fsspec
scheme, options, path, target = sys.argv[1:]
if scheme == "gs":
    from gcsfs.core import GCSFileSystem as kind  # without gRPC, which an emulator does not speak
else:
    from adlfs import AzureBlobFileSystem as kind
kind(**json.loads(options)).get(path, target, recursive=True)
"""
_HDFS_LIST = """
import sys, hdfs_native
print(sum(1 for _ in hdfs_native.Client(sys.argv[1]).list_status(sys.argv[2], recursive=True)))
"""
_S3_LIST = """
import sys, boto3
pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=sys.argv[1], Prefix=sys.argv[2])
print(sum(len(page["Contents"]) for page in pages))
"""

_DELTA_URIS = """
import sys, deltalake
print(len(deltalake.DeltaTable(sys.argv[1]).file_uris()))
"""
_DELTA_WRITE = """
import sys, deltalake, pyarrow as pa
table, commits, partitions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for commit in range(commits):
    ids = list(range(partitions))
    rows = pa.table({"id": ids, "price": [0.5] * partitions, "dt": [f"d{i}" for i in ids]})
    deltalake.write_deltalake(table, rows, mode="append", partition_by=["dt"])
"""


@dataclass(frozen=True)
class Run:
    """What one process took: seconds, CPU seconds of it and its children, and peak bytes resident.

    ``durable`` is the seconds until what it wrote is safe on the disk too.
    """

    seconds: float
    durable: float
    cpu: float
    memory: int


def measure(command: Sequence[str], env: Mapping[str, str], out: Path) -> Run:
    """Run ``command`` and measure it; memory is sampled, because ru_maxrss starts at the parent's peak."""
    start = time.perf_counter()
    before = os.times()
    process = psutil.Popen(
        list(command),
        env={**env, "PYTHONDONTWRITEBYTECODE": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss)
        except psutil.Error:
            break
        time.sleep(0.01)
    process.wait()
    seconds = time.perf_counter() - start
    after = os.times()
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}: {process.stderr.read().decode()[-500:]}")
    process.stderr.close()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    start = time.perf_counter()
    subprocess.run(["sync", "-f", str(out.parent)], check=True)
    return Run(seconds, seconds + time.perf_counter() - start, cpu, peak)


def compare(
    title: str,
    peers: Mapping[str, Callable[[Path], list[str]]],
    env: Mapping[str, str],
    rounds: int,
    size: int,
) -> None:
    """Run all peers in turn ``rounds`` times into fresh directories and print medians."""
    runs: dict[str, list[Run]] = {name: [] for name in peers}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        for number in range(rounds):
            for place, (name, command) in enumerate(peers.items()):
                os.sync()  # what the one before left to be written is not this one's
                out = Path(directory) / f"{number}-{place}" / "out"
                out.parent.mkdir()
                runs[name].append(measure(command(out), env, out))
                empty(out)
    ours = statistics.median(run.durable for run in runs["pqcache"])
    print(f"\n{title}\n")
    speeds = "MB/s, safe | " if size else ""
    print(f"| client | s | s, safe on disk | {speeds}against pqcache | CPU-s{'/GB' if size else ''} | peak MB |")
    print(f"|---|---|---|{'---|' if size else ''}---|---|---|")
    for name, some in sorted(runs.items(), key=lambda item: statistics.median(r.durable for r in item[1])):
        durable = statistics.median(run.durable for run in some)
        seconds = statistics.median(run.seconds for run in some)
        cpu = statistics.median(run.cpu for run in some) / (size / 1e9 if size else 1)
        speed = f"{size / 1e6 / durable:.0f} | " if size else ""
        memory = max(run.memory for run in some) / 1e6
        print(f"| {name} | {seconds:.2f} | {durable:.2f} | {speed}{durable / ours:.2f} | {cpu:.2f} | {memory:.0f} |")


def empty(out: Path) -> None:
    """Give the space back that files take, but not their inodes: ext4 avoids those that were just given back.

    Looking for others costs half a millisecond a file, which would be on the next one's account.
    """
    for path in out.rglob("*") if out.is_dir() else ():
        if path.is_file() and not path.is_symlink():
            path.chmod(0o644)
            os.truncate(path, 0)


def write_files(directory: Path, count: int, size: int) -> int:
    """Write ``count`` Parquet files of about ``size`` bytes that do not compress; return their bytes."""
    total = 0
    noise = np.random.default_rng(0).bytes(size)
    for number in range(count):
        path = directory / f"dt=2026-11-{1 + number % 8:02d}" / f"part-{number:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = max(1, size // 8192)
        step = size // rows
        table = pa.table({"n": [number] * rows, "b": [noise[i * step : (i + 1) * step] for i in range(rows)]})
        pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
        total += path.stat().st_size
    return total


def s3_peers(bucket: str, prefix: str) -> dict[str, Callable[[Path], list[str]]]:
    """Return the commands that copy ``s3://bucket/prefix`` into a directory."""
    url = f"s3://{bucket}/{prefix}"
    peers: dict[str, Callable[[Path], list[str]]] = {
        "pqcache": lambda out: [*PQCACHE, "sync", url, str(out), "-q"],
        "boto3 TransferManager": lambda out: [sys.executable, "-c", _TRANSFER_MANAGER, bucket, prefix, str(out)],
        "pyarrow copy_files": lambda out: [sys.executable, "-c", _COPY_FILES, bucket, prefix, str(out)],
    }
    if shutil.which("aws"):
        peers["aws s3 sync"] = lambda out: ["aws", "s3", "sync", "--only-show-errors", url, str(out)]
    if shutil.which("s5cmd"):
        peers["s5cmd cp"] = lambda out: ["s5cmd", "--endpoint-url", os.environ["S3"], "cp", f"{url}/*", f"{out}/"]
    if shutil.which("rclone"):
        remote = f":s3,provider=Ceph,env_auth=true,endpoint='{os.environ['S3']}':{bucket}/{prefix}"
        peers["rclone sync"] = lambda out: ["rclone", "--config", "/dev/null", "-q", "sync", remote, str(out)]
    missing = [name for name in ("aws", "s5cmd", "rclone") if not shutil.which(name)]
    if missing:
        print(f"not on this machine, so left out: {', '.join(missing)}")
    return peers


def cloud(kind: str, big: Path, size: int, rounds: int, base: Path) -> None:
    """Compare a first sync from an emulator of a cloud's store with fsspec's client of it."""
    with closing(gcs_server.start(base) if kind == "gs" else azure_server.start(base)) as server:
        if isinstance(server, gcs_server.Gcs):
            server.create_bucket("bench")
            name, options = "gcsfs get", {"endpoint_url": server.endpoint, "token": "anon"}
        else:
            server.create_container("bench")
            text = (
                f"AccountName={server.options['account_name']};AccountKey={server.key};BlobEndpoint={server.endpoint}"
            )
            name, options = "adlfs get", {"connection_string": text}
        server.upload_tree(big, "bench/big")
        given = [word for key, value in server.options.items() for word in ("-o", f"{key}={value}")]
        peers: dict[str, Callable[[Path], list[str]]] = {
            "pqcache": lambda out: [*PQCACHE, "sync", f"{kind}://bench/big", str(out), "-q", *given],
            name: lambda out: [
                sys.executable, "-c", _FSSPEC_GET, kind, json.dumps(options), "bench/big", str(out),
            ],
        }  # fmt: skip
        compare(f"{kind}://, 8 files, {size >> 20} MB, first sync", peers, dict(os.environ), rounds, size)


def main() -> None:
    """Start the servers, fill them, and print every comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tenth of the data, to try the script")
    parser.add_argument("--only", choices=[*_PARTS], action="append")
    arguments = parser.parse_args()
    only, part = arguments.only or _PARTS, 10 if arguments.small else 1
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        big, many, tiny = base / "big", base / "many", base / "tiny"
        big_size = write_files(big, 8, (128 << 20) // part) if {"bulk", "hdfs", "gs", "az"} & set(only) else 0
        many_size = write_files(many, 2000 // part, 1 << 20) if "small" in only else 0
        if "nothing" in only:
            write_files(tiny, 20_000 // part, 500)
        if "delta" in only:
            delta_table(base, arguments.rounds, part)
        if {"bulk", "small", "nothing"} & set(only):
            with closing(s3_server.start(base, capacity=8 << 30)) as s3:
                os.environ["S3"] = s3.endpoint
                env = {**os.environ, **s3.env}
                env.pop("AWS_CA_BUNDLE", None)  # no TLS here, and rclone stumbles over it
                client = s3.client()
                client.create_bucket(Bucket="bench")
                if "bulk" in only:
                    s3.upload_tree(big, "s3://bench/big")
                    title = f"S3, {8} files of {128 // part} MB, first sync"
                    compare(title, s3_peers("bench", "big"), env, arguments.rounds, big_size)
                if "small" in only:
                    s3.upload_tree(many, "s3://bench/many")
                    title = f"S3, {2000 // part:,} files of 1 MB, first sync"
                    compare(title, s3_peers("bench", "many"), env, arguments.rounds, many_size)
                if "nothing" in only:
                    s3.upload_tree(tiny, "s3://bench/tiny")
                    nothing_to_do("s3://bench/tiny", [_S3_LIST, "bench", "tiny/"], env, arguments.rounds, base, part)
                client.close()
        for kind in ("gs", "az"):
            if kind in only:
                cloud(kind, big, big_size, arguments.rounds, base)
        if {"hdfs", "nothing"} & set(only):
            with closing(hdfs_server.start(base)) as hdfs:
                env = dict(os.environ)
                if "hdfs" in only:
                    hdfs.upload_tree(big, f"{hdfs.url}/big")
                    peers: dict[str, Callable[[Path], list[str]]] = {
                        "pqcache": lambda out: [*PQCACHE, "sync", f"{hdfs.url}/big", str(out), "-q"],
                        "hdfs-native, one file after the other": lambda out: [
                            sys.executable, "-c", _HDFS_READ, hdfs.url, "/big", str(out),
                        ],
                    }  # fmt: skip
                    compare(f"HDFS, 8 files of {128 // part} MB, first sync", peers, env, arguments.rounds, big_size)
                if "nothing" in only:
                    hdfs.upload_tree(tiny, f"{hdfs.url}/tiny")
                    command = [_HDFS_LIST, hdfs.url, "/tiny"]
                    nothing_to_do(f"{hdfs.url}/tiny", command, env, arguments.rounds, base, part)


def nothing_to_do(url: str, listing: list[str], env: Mapping[str, str], rounds: int, base: Path, part: int) -> None:
    """Compare a sync that finds nothing new with the bare listing by the same client."""
    cache = base / f"cache-{url.partition(':')[0]}"
    subprocess.run([*PQCACHE, "sync", url, str(cache), "-q"], check=True, env=dict(env))
    peers: dict[str, Callable[[Path], list[str]]] = {
        "pqcache": lambda _: [*PQCACHE, "sync", str(cache), "-q"],
        "bare listing": lambda _: [sys.executable, "-c", *listing],
    }
    compare(f"{url.partition(':')[0]}, nothing to do in {20_000 // part:,} files", peers, env, rounds, 0)


def delta_table(base: Path, rounds: int, part: int) -> None:
    """Compare syncs of a Delta table of 10,000 files after 200 commits with deltalake's own list of its files."""
    table, cache, commits, behind = str(base / "delta"), base / "cache-delta", 200 // part, base / "cache-behind"
    env = dict(os.environ)
    uris = [sys.executable, "-c", _DELTA_URIS, table]
    for number, place in ((commits - 1, behind), (1, cache)):
        subprocess.run([sys.executable, "-c", _DELTA_WRITE, table, str(number), "50"], check=True)
        subprocess.run([*PQCACHE, "sync", table, str(place), "-q"], check=True)

    def one_behind(out: Path) -> list[str]:
        shutil.copytree(behind, out, symlinks=True)
        return [*PQCACHE, "sync", str(out), "-q"]

    title = f"Delta, {commits * 50:,} files after {commits} commits"
    nothing = {"pqcache": lambda _: [*PQCACHE, "sync", str(cache), "-q"], "DeltaTable.file_uris()": lambda _: uris}
    compare(f"{title}, nothing to do", nothing, env, rounds, 0)
    newer = {"pqcache": one_behind, "DeltaTable.file_uris()": lambda _: uris}
    compare(f"{title}, one commit behind", newer, env, rounds, 0)


if __name__ == "__main__":
    main()
