"""The first epoch from a cold start: seconds to the first batch and to the end, over a line of limited bandwidth.

    python benchmarks/cold.py [--rounds 3] [--limit 200MB] [--server s3|hdfs] [--small]

What is compared: training while the first copy arrives (``source=``), a copy by pqcache or rclone and then training,
and loaders that read from the store: Hugging Face datasets on the same files, MosaicML Streaming and WebDataset on the
same rows in their formats. The limits are a bare download of the files, and an epoch from a cache that is there.
Each is a process of its own, interleaved round by round; times begin after its imports. Peers run in the interpreter
that PQCACHE_PEERS names, and those that it does not have are left out. The server and the limit are on 127.0.0.1.
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
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bandwidth import BandwidthLimit  # noqa: E402
from pqcache.units import parse_size  # noqa: E402
from tests.servers import hdfs as hdfs_server  # noqa: E402
from tests.servers import s3 as s3_server  # noqa: E402

_BATCH = 256
_COUNT = """
def epoch(batches, size=len):
    start, first, rows = time.perf_counter(), None, 0
    for batch in batches:
        first = first or time.perf_counter() - BEGIN
        rows += size(batch)
    print(json.dumps({"first": first, "epoch": time.perf_counter() - BEGIN, "rows": rows}))
"""
_SCRIPTS = {
    "pqcache": """
from pqcache.torch import Loader, ParquetDataset
BEGIN = time.perf_counter()
dataset = ParquetDataset(out, source=url, batch_size=256, nulls="mask")
epoch(Loader(dataset, num_workers=workers), lambda batch: len(batch["id"]))
""",
    "train": """
from pqcache.torch import Loader, ParquetDataset
BEGIN = time.perf_counter()
if copy == "pqcache":
    subprocess.run([sys.executable, "-m", "pqcache", "sync", url, out, "-q"], check=True)
elif copy == "rclone":
    bucket = url.removeprefix("s3://")
    subprocess.run(["rclone", "copy", f":s3:{bucket}", out, "--transfers", "8", "-q"], check=True)
dataset = ParquetDataset(out, batch_size=256, nulls="mask")
epoch(Loader(dataset, num_workers=workers), lambda batch: len(batch["id"]))
""",
    "huggingface": """
import datasets
from torch.utils.data import DataLoader
BEGIN = time.perf_counter()
options = {"key": os.environ["AWS_ACCESS_KEY_ID"], "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
           "endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
files = datasets.load_dataset("parquet", data_files=f"{url}/*/*.parquet", split="train", streaming=True,
                              storage_options=options)
files = files.shuffle(seed=0, buffer_size=1000)
epoch(DataLoader(files, batch_size=256, num_workers=workers, collate_fn=list))
""",
    "mosaicml": """
import _stub_torchvision, streaming
from torch.utils.data import DataLoader
streaming.base.util.clean_stale_shared_memory()
BEGIN = time.perf_counter()
files = streaming.StreamingDataset(remote=url, local=out, shuffle=True, batch_size=256)
epoch(DataLoader(files, batch_size=256, num_workers=workers, collate_fn=list))
""",
    "litdata": """
import _stub_torchvision, litdata
BEGIN = time.perf_counter()
options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
loader = {}
if parquet:
    from litdata.streaming.item_loader import ParquetLoader
    litdata.index_parquet_dataset(url, cache_dir=out, storage_options=options)
    loader = {"item_loader": ParquetLoader()}
files = litdata.StreamingDataset(url, cache_dir=out, storage_options=options, shuffle=True, **loader)
start = {"multiprocessing_context": "spawn"} if parquet else {}  # it refuses to fork
epoch(litdata.StreamingDataLoader(files, batch_size=256, num_workers=workers, collate_fn=list, **start))
""",
    "webdataset": """
import webdataset
BEGIN = time.perf_counter()
shards = [f"pipe:curl -s '{address}'" for address in json.loads(url)]
files = webdataset.WebDataset(shards, shardshuffle=100, empty_check=False).shuffle(1000)
files = files.to_tuple("id", "tokens", "image")
epoch(webdataset.WebLoader(files.batched(256), batch_size=None, num_workers=workers), lambda batch: len(batch[0]))
""",
}


def write_lake(directory: Path, files: int, file_bytes: int) -> int:
    """Write skewed rows of about 8 KB (id, title, tokens, image) as pyarrow does by default; return their bytes."""
    rng, total = np.random.default_rng(0), 0
    words = np.array([f"word{i}" for i in range(5000)])
    rows = max(1, file_bytes // 8500)
    for number in range(files):
        path = directory / f"dt=2026-11-{1 + number % 8:02d}" / f"part-{number:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        tokens = [rng.zipf(1.3, int(n)).clip(max=50_000).astype(np.int32) for n in rng.integers(20, 200, rows)]
        table = pa.table(
            {
                "id": np.arange(number * rows, (number + 1) * rows),
                "title": [" ".join(words[rng.zipf(1.4, 8) % 5000]) for _ in range(rows)],
                "tokens": pa.array(tokens, pa.list_(pa.int32())),
                "image": [rng.bytes(int(n)) for n in rng.integers(4000, 12_000, rows)],
            }
        )
        pq.write_table(table, path)
        total += path.stat().st_size
    return total


_WRITE_MDS = """
import _stub_torchvision, sys, pyarrow.dataset
from streaming import MDSWriter
kinds = {"id": "int", "title": "str", "tokens": "ndarray:int32", "image": "bytes"}
with MDSWriter(out=sys.argv[2], columns=kinds, size_limit=16 << 20) as out:
    for batch in pyarrow.dataset.dataset(sys.argv[1]).to_batches():
        tokens = [values.values.to_numpy() for values in batch["tokens"]]
        for row, ids in zip(batch.select(["id", "title", "image"]).to_pylist(), tokens):
            out.write({**row, "tokens": ids})
"""
_WRITE_TARS = """
import sys, pyarrow.dataset, webdataset
with webdataset.ShardWriter(f"{sys.argv[2]}/%05d.tar", maxsize=16 << 20, verbose=0) as out:
    for batch in pyarrow.dataset.dataset(sys.argv[1]).to_batches():
        tokens = [values.values.to_numpy().tobytes() for values in batch["tokens"]]
        for row, ids in zip(batch.select(["id", "title", "image"]).to_pylist(), tokens):
            key = {"__key__": str(row["id"]), "id": str(row["id"]).encode(), "title": row["title"].encode()}
            out.write({**key, "tokens": ids, "image": row["image"]})
"""
_WRITE_LITDATA = """
import glob, sys, pyarrow.dataset
import _stub_torchvision, litdata
def rows(path):
    for batch in pyarrow.dataset.dataset(path).to_batches():
        for row in batch.to_pylist():
            yield row
if __name__ == "__main__":
    files = sorted(glob.glob(sys.argv[1] + "/*/*.parquet"))
    litdata.optimize(fn=rows, inputs=files, output_dir=sys.argv[2], chunk_bytes="16MB", num_workers=2)
"""


def run(python: str, script: str, values: Mapping[str, object], env: Mapping[str, str]) -> dict[str, float] | None:
    """Run one contender; return its times, or None if it cannot run here."""
    names = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    body = "\n".join(f"    {line}" for line in f"{_COUNT}{_SCRIPTS[script]}".splitlines())
    code = f"import json, os, subprocess, sys, time\n{names}if __name__ == '__main__':\n{body}\n"
    done = run_script(python, code, [], env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{script} cannot run: {(done.stderr.strip().splitlines() or ['no output'])[-1][:200]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(lines[-1])
    return found


def run_script(
    python: str, code: str, arguments: list[str], env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, from a file, as workers that are spawned read it again."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "script.py"
        script.write_text(code)
        path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
        return subprocess.run(
            [python, str(script), *arguments],
            env={**os.environ, **env, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )


def bare_download(url: str, out: Path, env: Mapping[str, str]) -> float:
    """Return the seconds of a copy without any training."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pqcache", "sync", url, str(out), "-q"], env={**os.environ, **env}, check=True, cwd=ROOT
    )
    return time.perf_counter() - start


def measure(
    contenders: Mapping[str, Callable[[Path], dict[str, float] | None]], rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Run all contenders in turn; one that cannot run is left out of later rounds.

    What they write is removed at the end: ext4 looks for long at the numbers of files that were deleted just before.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        for number in range(rounds):
            for place, (name, contend) in enumerate(contenders.items()):
                if number and not found[name]:
                    continue
                out = Path(directory) / f"{number}-{place}"
                os.sync()
                if (times := contend(out)) is not None:
                    found[name].append(times)
    return {name: times for name, times in found.items() if times}


def show(title: str, found: Mapping[str, list[dict[str, float]]], limit: float) -> None:
    """Print medians, and ratios to the larger of the two limits."""
    print(f"\n{title}\n\n| what | first batch, s | first epoch, s | against the limit |\n|---|---|---|---|")
    for name, times in found.items():
        first, epoch = (statistics.median(t[key] for t in times) for key in ("first", "epoch"))
        print(f"| {name} | {first:.2f} | {epoch:.2f} | {epoch / limit:.2f} |")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", default="200MB", help="bytes a second of the server, 0 for none")
    parser.add_argument("--server", choices=["s3", "hdfs"], default="s3")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--file-bytes", default="1MB")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    files, file_bytes = (40, 1 << 20) if given.small else (given.files, parse_size(given.file_bytes))
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR"))))
        lake = base / "lake"
        size = write_lake(lake, files, file_bytes)
        limit = 0 if given.limit == "0" else parse_size(given.limit)
        url, env, client = serve(stack, given.server, lake, base, limit)
        cached = base / "cached"
        bare_download(url, cached, env)
        python, values = sys.executable, {"url": url, "workers": given.workers}
        contenders: dict[str, Callable[[Path], dict[str, float] | None]] = {
            "bare download": lambda out: dict.fromkeys(("first", "epoch"), bare_download(url, out, env)),
            "epoch from a cache": lambda out: run(python, "train", {**values, "out": str(cached), "copy": ""}, env),
            "pqcache, source=": lambda out: run(python, "pqcache", {**values, "out": str(out)}, env),
            "pqcache sync, then training": lambda out: run(
                python, "train", {**values, "out": str(out), "copy": "pqcache"}, env
            ),
        }
        if given.server == "s3":
            contenders.update(peers(values, env, lake, base, client))
        found = measure(contenders, given.rounds)
    bounds = ("bare download", "epoch from a cache")
    bound = max(statistics.median(times["epoch"] for times in found[name]) for name in bounds)
    line = f"{limit / 1e6:.0f} MB/s" if limit else "no limit"
    title = f"{files} files, {size / 1e6:.0f} MB, {given.server}, {line}, {given.workers} workers"
    show(title, found, bound)


def serve(stack: ExitStack, server: str, lake: Path, base: Path, limit: int) -> tuple[str, dict[str, str], Any]:
    """Start a server with the lake's files, behind a limit; return the URL, the environment, and a client of S3."""
    if server == "hdfs":
        hdfs = stack.enter_context(closing(hdfs_server.start(base)))
        hdfs.upload_tree(lake, f"{hdfs.url}/lake")
        if not limit:
            return f"{hdfs.url}/lake", {}, None
        line = stack.enter_context(BandwidthLimit([hdfs.http_url, hdfs.datanode_http_url], limit))
        return f"{line.url(hdfs.webhdfs_url)}/lake", {}, None
    s3 = stack.enter_context(closing(s3_server.start(base, capacity=12 << 30)))
    client = s3.client()
    client.create_bucket(Bucket="lake")
    for path in sorted(lake.rglob("*.parquet")):
        client.upload_file(str(path), "lake", f"shop/{path.relative_to(lake)}")
    env = dict(s3.env)
    if limit:
        env["AWS_ENDPOINT_URL"] = stack.enter_context(BandwidthLimit([s3.endpoint], limit)).url(s3.endpoint)
    return "s3://lake/shop", env, client


def peers(
    values: Mapping[str, object], env: Mapping[str, str], lake: Path, base: Path, client: Any
) -> dict[str, Callable[[Path], dict[str, float] | None]]:
    """Return the other tools that are here."""
    found: dict[str, Callable[[Path], dict[str, float] | None]] = {}
    if shutil.which("rclone"):
        rclone = {
            **env,
            "AWS_CA_BUNDLE": "",  # its client takes none from there
            "RCLONE_S3_PROVIDER": "Ceph",
            "RCLONE_S3_ENV_AUTH": "true",
            "RCLONE_S3_ENDPOINT": env["AWS_ENDPOINT_URL"],
        }
        found["rclone, then training"] = lambda out: run(
            sys.executable, "train", {**values, "out": str(out), "copy": "rclone"}, rclone
        )
    python = os.environ.get("PQCACHE_PEERS")
    if not python:
        return found
    found["Hugging Face datasets, streaming"] = lambda out: run(python, "huggingface", values, env)
    for name, write in (("mds", _WRITE_MDS), ("tars", _WRITE_TARS), ("litdata", _WRITE_LITDATA)):
        (base / name).mkdir()
        done = run_script(python, write, [str(lake), str(base / name)], {})
        if done.returncode:
            print(f"{name} cannot be written: {done.stderr.strip().splitlines()[-1][:200]}", file=sys.stderr)
        for path in sorted((base / name).iterdir()):
            client.upload_file(str(path), "lake", f"{name}/{path.name}")
    tars = [f"tars/{path.name}" for path in sorted((base / "tars").iterdir())]
    with_limit = boto3.client("s3", endpoint_url=env["AWS_ENDPOINT_URL"], **credentials(env))
    signed = [
        with_limit.generate_presigned_url("get_object", Params={"Bucket": "lake", "Key": key}, ExpiresIn=36_000)
        for key in tars
    ]
    mosaic = {**env, "S3_ENDPOINT_URL": env["AWS_ENDPOINT_URL"]}
    found["MosaicML Streaming, 0 workers"] = lambda out: run(  # 0.13 fails with workers: "index out of range"
        python, "mosaicml", {**values, "url": "s3://lake/mds", "out": str(out), "workers": 0}, mosaic
    )
    for path in lake.rglob("*.parquet"):  # it does not look into partition directories
        client.upload_file(str(path), "lake", f"flat/{path.name}")
    for name, place in (("litdata", "s3://lake/litdata"), ("litdata, Parquet", "s3://lake/flat")):
        given = {**values, "url": place, "parquet": "Parquet" in name}
        found[name] = partial(lambda given, out: run(python, "litdata", {**given, "out": str(out)}, env), given)
    found["WebDataset, curl"] = lambda out: run(python, "webdataset", {**values, "url": json.dumps(signed)}, env)
    return found


def credentials(env: Mapping[str, str]) -> dict[str, str]:
    """Return what boto3 needs to know of the user, from the environment of the server's clients."""
    return {
        "aws_access_key_id": env["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": env["AWS_SECRET_ACCESS_KEY"],
        "region_name": env["AWS_DEFAULT_REGION"],
    }


if __name__ == "__main__":
    main()
