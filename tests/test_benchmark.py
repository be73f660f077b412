"""What bench measures and advises; rates themselves are not tested, since they are the machine's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.benchmark import Advice, BenchReport, Measured, advise, bench, describe_training, forecast_of, recommended
from pqcache.console.inspect_text import print_bench
from pqcache.errors import ParquetError, UsageError
from pqcache.reader.decode import RowGroups
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.read_plan import make_read_plan
from pqcache.system.processes import disk_read_bytes, pss
from tests import ROOT
from tests.datasets import write_shop

QUICK = 0.05  # seconds


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench")
    pqcache.sync(str(write_shop(root / "shop", rows=600)), root / "cache")
    return root / "cache"


def state_of(cache: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(cache.rglob("*"))}


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    found = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run([sys.executable, "-m", "pqcache", "bench", *words], capture_output=True, text=True, env=found)


def test_a_real_run(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state_of(cache)
    report = bench(cache, workers=[0, 1], seconds=QUICK, batch_size=64)
    assert state_of(cache) == before
    assert [item.workers for item in report.measured] == [0, 1]
    assert (report.rows, report.row_groups, len(report.columns)) == (5400, 18, 7)
    assert report.snapshot == pqcache.Cache.open(cache).snapshot().id
    assert 0 < report.bytes <= sum(path.stat().st_size for path in (cache / "current").rglob("*.parquet"))
    for item in report.measured:
        assert item.rows_per_second > 0
        assert item.of_limit == pytest.approx(item.rows_per_second / report.limit)
        assert item.bytes_per_second == pytest.approx(item.rows_per_second * report.decoded / report.rows)
        assert item.window == 18, "all fit"
        assert item.limited_by in ("storage", "start", "decode", "gather", "transfer")
        assert min(item.seconds_of["decode"], item.seconds_of["gather"]) > 0
        assert (item.seconds_of["send"] > 0) == (item.workers == 1)
        if sys.platform == "linux":
            assert item.memory is not None
            assert item.memory > 50 << 20  # Python, Arrow and torch are there
    assert report.recommended in (0, 1)
    print_bench(report)
    shown = capsys.readouterr().out
    assert f"recommended  num_workers={report.recommended}" in shown
    assert "limit" in shown
    assert "bottleneck   " in shown


def test_the_command_line_reads_a_share_without_torch(cache: Path, tmp_path: Path) -> None:
    """As where torch is not installed: every process of the bench refuses to import it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    pqcache.sync(str(cache.parent / "shop"), tmp_path / "cache", shard="0/3")
    words = [str(tmp_path / "cache"), "--columns", "id,price,dt", "--filters", "id < 101000"]
    done = run(*words, "--seconds", str(QUICK), "--json", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) - {"event"} == {field.name for field in fields(BenchReport)}
    assert found["columns"] == ["id", "price", "dt"]
    ids = pq.read_table(tmp_path / "cache" / "current", columns=["id"])["id"].to_numpy()
    assert 0 < found["rows"] == np.count_nonzero(ids < 101_000) < len(ids) < 5400
    (measured,) = found["measured"]
    assert set(measured) == {field.name for field in fields(Measured)}
    assert (measured["workers"], found["recommended"]) == (None, None)
    assert measured["rows_per_second"] > 0
    assert all(set(item) == {field.name for field in fields(Advice)} for item in found["advice"])
    assert any("pqcache[torch]" in item["text"] for item in found["advice"])


@pytest.mark.filterwarnings("error")  # one line says it
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"columns": ["nope"]}, "no column 'nope'"),
        ({"filters": "dt = '2027-01-01'"}, "no row to read that satisfies"),
        ({"batch_size": 0}, "batch_size"),
        ({"seconds": 0}, "seconds=0"),
        ({"workers": [-1]}, "--workers"),
    ],
)
def test_what_makes_no_sense_is_named(cache: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench(cache, **{"seconds": QUICK, **how})


def test_errors_of_the_measuring_processes_are_raised(cache: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"s": [f"text {i}" for i in range(1000)]}), tmp_path / "a.parquet", compression="zstd")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[100:200] = bytes(100)
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(ParquetError, match=r"a.parquet: row group 0 cannot be read"):
        bench(tmp_path, workers=[0], seconds=QUICK)
    assert run(str(tmp_path / "nothing")).returncode == 2


def measured(workers: int | None, rate: float = 1.0, of_limit: float = 0.9) -> Measured:
    return Measured(
        workers=workers,
        rows_per_second=rate,
        bytes_per_second=1.0,
        of_limit=of_limit,
        first_batch=0.1,
        memory=None,
        from_disk=None,
        window=16,
    )


def test_the_fewest_workers_that_are_about_as_fast_are_recommended() -> None:
    for rates, workers in (((100, 50, 90), 0), ((97, 100, 90), 0), ((50, 97, 100), 1)):
        assert recommended([measured(number, rate) for number, rate in enumerate(rates)]) == workers
    assert recommended([measured(None)]) is None


def advice_for(
    groups: RowGroups, memory: int = 64 << 20, of_limit: float = 0.9, dense: dict[str, float] | None = None
) -> list[Advice]:
    plan = groups.plan
    report = BenchReport(
        target=str(plan.data.root),
        snapshot="",
        columns=plan.columns,
        batch_size=4096,
        memory=memory,
        cores=2,
        seconds=1,
        rows=int(plan.counts.sum()),
        row_groups=len(plan.row_groups),
        bytes=1,
        decoded=int(groups.sizes.selected.sum()),
        limit=1,
        limit_from_disk=None,
        measured=(measured(2, of_limit=of_limit),),
        recommended=2,
        advice=(),
    )
    return list(advise(report, groups, dense or {}))


def groups_of(root: Path, number: int, rows: int, columns: int = 1) -> RowGroups:
    root.mkdir()
    table = pa.table({f"c{i}": np.random.default_rng(i).random(number * rows) for i in range(columns)})
    pq.write_table(table, root / "a.parquet", row_group_size=rows, use_dictionary=False, compression="none")
    return RowGroups(make_read_plan(open_local_dataset(root)[0], None))


def test_advice(tmp_path: Path) -> None:
    fine = groups_of(tmp_path / "fine", 40, 200_000)
    (verdict,) = advice_for(fine)
    assert verdict.command is None
    given, *lines = describe_training(forecast_of(fine.plan, fine.sizes, 64 << 20, 2), 40)
    assert verdict.text == f"{given}: {'; '.join(lines)}", "the words of inspect"
    dense, _ = advice_for(fine, dense={"tokens": 0.9, "box": 0.1})
    assert dense.command == f"pqcache repartition {fine.plan.data.root} DEST --dense tokens"
    small, batch = advice_for(groups_of(tmp_path / "small", 2200, 1000), of_limit=0.2)
    assert "the fixed cost of small ones shows" in small.text
    assert "larger batches are read faster" in batch.text


def test_advised_sizes_are_taken_by_repartition(tmp_path: Path) -> None:
    groups = groups_of(tmp_path / "few", 3, 900_000)
    (few,) = advice_for(groups)
    words = (few.command or "").split()
    size = pqcache.parse_size(words[words.index("--row-group-size") + 1])
    pqcache.repartition(groups.plan.data.root, tmp_path / "out", row_group_size=size)
    assert len(make_read_plan(open_local_dataset(tmp_path / "out")[0], None).row_groups) >= 4


SHARES_AND_WAITS = """
import os, sys
held = b"x" * (64 << 20)
child = os.fork()
if child:
    print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_memory_counts_children_and_what_is_shared_once() -> None:
    words = [sys.executable, "-c", SHARES_AND_WAITS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        taken = pss(process.pid)
        read = disk_read_bytes(process.pid)
    assert taken is not None
    assert 64 << 20 < taken < 110 << 20
    assert read is not None
    assert pss(process.pid) is None  # it has ended
