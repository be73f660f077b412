"""The demo's dataset: made quickly, the same for a seed, and badly cut where it says so."""

from __future__ import annotations

import hashlib
import io
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

DEMO = Path(__file__).parents[1] / "demo"


@pytest.fixture(scope="module")
def make_shop() -> ModuleType:
    pytest.importorskip("PIL")
    sys.path.insert(0, str(DEMO))
    try:
        import make_shop
    finally:
        sys.path.remove(str(DEMO))
    return make_shop


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.parquet"))


def digests(root: Path) -> dict[str, str]:
    return {str(f.relative_to(root)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files(root)}


def test_days_are_cut_as_promised(make_shop: ModuleType, tmp_path: Path) -> None:
    days = make_shop.make_shop(tmp_path, days=4, rows=240)
    cuts = [[pq.read_metadata(f).num_row_groups for f in files(tmp_path / f"dt={day}")] for day in days]
    assert cuts[1] == [1]
    assert cuts[2] == [1] * 60
    assert len(cuts[0]) == len(cuts[3]) == 4
    assert all((tmp_path / f"dt={day}" / "_SUCCESS").exists() for day in days)
    ids = pa.concat_tables(pq.ParquetFile(f).read(["id"]) for f in files(tmp_path))["id"].to_pylist()
    assert len(ids) == len(set(ids)) == 4 * 240


def test_a_seed_makes_the_same_files(make_shop: ModuleType, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_shop.make_shop(tmp_path / name, days=2, rows=50, seed=seed)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert not set(digests(tmp_path / "a").values()) & set(digests(tmp_path / "c").values())


def test_pictures_are_distinct_jpegs(make_shop: ModuleType) -> None:
    from PIL import Image

    images = make_shop.make_rows(make_shop.FIRST_DAY, 100)["image"].to_pylist()
    assert len(set(images)) == 100
    for jpeg in images[:20]:
        with Image.open(io.BytesIO(jpeg)) as image:
            image.load()
            assert (image.format, image.size) == ("JPEG", (make_shop.SIDE, make_shop.SIDE))


def test_a_revision_keeps_the_rows_and_adds_late_ones(make_shop: ModuleType, tmp_path: Path) -> None:
    day = make_shop.FIRST_DAY + timedelta(days=3)
    before = make_shop.make_day(tmp_path, day, rows=100)
    after = make_shop.make_day(tmp_path, day, rows=100, revision=1)
    written = pa.concat_tables(pq.ParquetFile(f).read() for f in files(tmp_path))
    assert written.equals(after)
    assert after["id"][:100].to_pylist() == before["id"].to_pylist()
    assert after["price"][:100].to_pylist() != before["price"].to_pylist()
    assert after.num_rows == len(set(after["id"].to_pylist())) == 106
