"""What datasets and loaders are is seen where they are printed, and a URL is shown as it was given."""

from __future__ import annotations

from pathlib import Path

import pytest

import pqcache
from pqcache.errors import UsageError
from pqcache.torch import Loader, Mix, ParquetDataset
from tests.datasets import write_shop


def test_a_repr_tells(tmp_path: Path) -> None:
    snapshot = pqcache.sync(write_shop(tmp_path / "shop", rows=20), tmp_path / "cache").snapshot
    dataset = ParquetDataset(tmp_path / "cache", columns=["id", "price"], batch_size=64, lanes=4)
    expected = f"<ParquetDataset {tmp_path}/cache ({snapshot}): 180 rows, 2 columns, batch_size=64, lanes=4>"
    assert repr(dataset) == expected
    assert repr(Loader(dataset, num_workers=0)) == f"<Loader with num_workers=0 of {expected}>"
    whole = ParquetDataset(tmp_path / "cache", batch_size=64, nulls="mask")
    assert repr(Mix({"shop": whole})) == f"<Mix of 'shop': {whole!r}>"
    rows = ParquetDataset(tmp_path / "cache", batch_size=None, weights="price", nulls="mask")
    assert "rows that epochs draw, 7 columns, batch_size=None, lanes=one for each worker of each rank" in repr(rows)
    sequences = pqcache.Sequence(length=2, order_by="id")
    assert " sequences, " in repr(ParquetDataset(tmp_path / "cache", sequence=sequences, nulls="mask"))


@pytest.mark.parametrize("path", ["s3://lake/shop", Path("s3://lake/shop")], ids=["text", "path"])
def test_a_url_is_shown_as_it_was_given(path: str | Path) -> None:
    with pytest.raises(UsageError, match=r"^s3://lake/shop: not a local path; run 'pqcache sync s3://lake/shop DIR"):
        ParquetDataset(path)


def test_a_directory_may_look_like_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shop(tmp_path / "s3:" / "lake", rows=20)
    monkeypatch.chdir(tmp_path)
    assert len(ParquetDataset(Path("s3:/lake"), ["id"], batch_size=None)) == 180
