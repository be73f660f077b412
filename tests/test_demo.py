"""``pqcache demo`` checks its claims; its dataset is the same for a seed, and cut as it says.

tests/test_package.py runs it from the wheel, without torch.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.console import demo
from pqcache.errors import PqcacheError
from tests.forked_commands import run_pqcache


@pytest.mark.deep  # four trainings with torch and its workers
def test_it_runs_with_torch(tmp_path: Path) -> None:
    done = run_pqcache("demo", cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A small torch model" in done.stdout
    assert "\n 17. a sync without changes fetches nothing" in done.stdout


def test_it_leaves_directories_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = run_pqcache("demo", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"pqcache: error: {tmp_path}: not empty, and not from an earlier demo; name another directory\n"
    )
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_false_claim_ends_it(tmp_path: Path) -> None:
    made = demo.Demo(tmp_path)
    made.proves("one is one", True)
    with pytest.raises(PqcacheError, match="one is two"):
        made.proves("one is two", False)
    with pytest.raises(PqcacheError, match=r"exit code 0 \(it was 1\)"):
        demo.pqcache("inspect", tmp_path / "nothing")
    assert made.proved == ["one is one"]


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.parquet"))


def digests(root: Path) -> dict[str, str]:
    return {str(f.relative_to(root)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files(root)}


def test_days_are_cut_as_promised(tmp_path: Path) -> None:
    days = demo.make_shop(tmp_path, days=4, rows=240)
    cuts = [[pq.read_metadata(f).num_row_groups for f in files(tmp_path / f"dt={day}")] for day in days]
    assert cuts[1] == [1]
    assert cuts[2] == [1] * 60
    assert len(cuts[0]) == len(cuts[3]) == 4
    assert all((tmp_path / f"dt={day}" / "_SUCCESS").exists() for day in days)
    ids = pa.concat_tables(pq.ParquetFile(f).read(["id"]) for f in files(tmp_path))["id"].to_pylist()
    assert len(ids) == len(set(ids)) == 4 * 240


def test_a_seed_makes_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        demo.make_shop(tmp_path / name, days=2, rows=50, seed=seed)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert not set(digests(tmp_path / "a").values()) & set(digests(tmp_path / "c").values())


def test_a_revision_keeps_the_rows_and_adds_late_ones(tmp_path: Path) -> None:
    day = demo.FIRST_DAY + timedelta(days=3)
    before = demo.make_day(tmp_path, day, rows=100)
    after = demo.make_day(tmp_path, day, rows=100, revision=1)
    written = pa.concat_tables(pq.ParquetFile(f).read() for f in files(tmp_path))
    assert written.equals(after)
    assert after["id"][:100].to_pylist() == before["id"].to_pylist()
    assert after["price"][:100].to_pylist() != before["price"].to_pylist()
    assert after.num_rows == len(set(after["id"].to_pylist())) == 106
